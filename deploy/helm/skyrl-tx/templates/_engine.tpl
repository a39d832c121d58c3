{{/* The template of a pod with an engine alone, or with one host of a group. */}}
{{- define "skyrl-tx.enginePod" -}}
metadata:
  labels:
    {{- include "skyrl-tx.engineSelector" .root | nindent 4 }}
    app.kubernetes.io/component: engine
  annotations:
    checksum/config: {{ toYaml .root.Values.config | sha256sum }}
    {{- with .root.Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "skyrl-tx.podCommon" .root | nindent 2 }}
  {{- with include "skyrl-tx.placement" .root }}
  {{- trim . | nindent 2 }}
  {{- end }}
  containers:
    - name: engine
      {{- $common := include "skyrl-tx.containerCommon" .root | fromYaml }}
      {{- if .isGroup }}
      {{- $secret := dict "name" .root.Values.hosts.existingSecret "key" .root.Values.hosts.existingSecretKey }}
      {{- $key := dict "name" "SKYRL_TX_HOSTS__KEY" "valueFrom" (dict "secretKeyRef" $secret) }}
      {{- $_ := set $common "env" (append $common.env $key) }}
      {{- end }}
      {{- toYaml $common | nindent 6 }}
      command:
        - skyrl-tx
        - engine
        # All numbers above 1 mean the same: other engines share the database. This number is not
        # engines.replicas, so that scaling does not restart the engines that run.
        - --engines=2
        - --config=/etc/skyrl-tx/config.yaml
        {{- if .isGroup }}
        - --launcher=lws
        {{- end }}
        {{- if and .hasProbe .root.Values.metrics.serviceMonitor.enabled }}
        - --metrics-host=0.0.0.0
        - --metrics-port={{ .root.Values.metrics.enginePort }}
      ports:
        - name: metrics
          containerPort: {{ .root.Values.metrics.enginePort }}
        {{- end }}
      {{- if .hasProbe }}
      # Once it is ready, the engine watches itself and the others watch it: no probe could tell a long step from a stuck one.
      startupProbe:
        exec:
          command: [skyrl-tx, status, --here]
        timeoutSeconds: 10
        periodSeconds: 10
        failureThreshold: {{ mul .root.Values.probes.startMinutes 6 }}
      {{- end }}
      {{- with .root.Values.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
  volumes:
    {{- include "skyrl-tx.volumes" .root | nindent 4 }}
    # Copies of weights in the object store.
    - name: data
      emptyDir: {}
    {{- if .root.Values.cache.existingClaim }}
    - name: cache
      persistentVolumeClaim:
        claimName: {{ .root.Values.cache.existingClaim }}
    {{- else if or .isGroup .root.Values.cache.isEphemeral }}
    - name: cache
      emptyDir: {}
    {{- end }}
{{- end }}
