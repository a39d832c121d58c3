// Colours of the style sheet for canvases.

export const dark = matchMedia("(prefers-color-scheme: dark)");

/** Resolves a light-dark() custom property, which a canvas does not understand. */
export function cssColour(name) {
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  probe.style.color = `var(--${name})`;
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
