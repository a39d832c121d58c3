{{- define "skyrl-tx.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "skyrl-tx.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "skyrl-tx.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "skyrl-tx.serviceAccount" -}}
{{- if .Values.serviceAccount.name }}{{ .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create }}{{ include "skyrl-tx.name" . }}
{{- else }}default{{ end }}
{{- end }}

{{- define "skyrl-tx.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "skyrl-tx.hasDatabase" -}}
{{- if or .Values.database.url .Values.database.existingSecret }}true{{ end }}
{{- end }}

{{- define "skyrl-tx.scheme" -}}
{{- if .Values.tls.existingSecret }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}

{{/* Labels of pods with an engine alone, which no Service selects. */}}
{{- define "skyrl-tx.engineSelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-engine
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* A probe of an endpoint of the API. */}}
{{- define "skyrl-tx.probe" -}}
httpGet:
  path: /api/v1/{{ .endpoint }}
  port: http
  scheme: {{ include "skyrl-tx.scheme" .root }}
timeoutSeconds: 5
{{- end }}

{{/* What all pods have in common. */}}
{{- define "skyrl-tx.podCommon" -}}
serviceAccountName: {{ include "skyrl-tx.serviceAccount" . }}
automountServiceAccountToken: false
# Kubernetes would set SKYRL_TX_PORT and others for a Service of that name, and the server takes these for settings.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Where pods with engines run. */}}
{{- define "skyrl-tx.placement" -}}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What all containers have in common. */}}
{{- define "skyrl-tx.containerCommon" -}}
image: {{ include "skyrl-tx.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
env:
  # A directory below the volume's, which belongs to another user.
  - name: SKYRL_TX_DATA_DIR
    value: /data/skyrl_tx
  - name: XDG_CACHE_HOME
    value: /cache
  {{- if include "skyrl-tx.hasDatabase" . }}
  - name: SKYRL_TX_DATABASE_URL
    valueFrom:
      secretKeyRef:
        name: {{ .Values.database.existingSecret | default (include "skyrl-tx.name" .) }}
        key: {{ ternary .Values.database.existingSecretKey "database-url" (ne .Values.database.existingSecret "") }}
  {{- end }}
  {{- if or .Values.hub.token .Values.hub.existingSecret }}
  - name: HF_TOKEN
    valueFrom:
      secretKeyRef:
        name: {{ .Values.hub.existingSecret | default (include "skyrl-tx.name" .) }}
        key: {{ ternary .Values.hub.existingSecretKey "hub-token" (ne .Values.hub.existingSecret "") }}
  {{- end }}
  {{- if .Values.tls.existingSecret }}
  - name: SKYRL_TX_SSL_CERTFILE
    value: /etc/skyrl-tx-tls/tls.crt
  - name: SKYRL_TX_SSL_KEYFILE
    value: /etc/skyrl-tx-tls/tls.key
  {{- end }}
  {{- with .Values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
volumeMounts:
  - name: data
    mountPath: /data
  - name: cache
    mountPath: /cache
  - name: tmp
    mountPath: /tmp
  - name: config
    mountPath: /etc/skyrl-tx
    readOnly: true
  {{- if .Values.tls.existingSecret }}
  - name: tls
    mountPath: /etc/skyrl-tx-tls
    readOnly: true
  {{- end }}
{{- end }}

{{/* Volumes that no claim of the StatefulSet makes. */}}
{{- define "skyrl-tx.volumes" -}}
- name: tmp
  emptyDir: {}
- name: config
  configMap:
    name: {{ include "skyrl-tx.name" . }}
{{- with .Values.tls.existingSecret }}
- name: tls
  secret:
    secretName: {{ . }}
{{- end }}
{{- end }}

{{/* A claim that a StatefulSet makes. */}}
{{- define "skyrl-tx.claimSpec" -}}
accessModes:
  {{- toYaml .accessModes | nindent 2 }}
{{- with .storageClass }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .size }}
{{- end }}
