// The script of every page: polls while the page is visible, copies text, asks for confirmation, enables buttons.

const offline = document.querySelector(".offline");

document.addEventListener("htmx:before:request", (event) => {
  if (document.hidden || isBusy()) event.preventDefault();
});
document.addEventListener("htmx:response:error", (event) => {
  if (event.detail?.ctx?.response?.status === 401) location.reload(); // to the log-in page
  else offline.hidden = false;
});
document.addEventListener("htmx:error", () => { offline.hidden = false; });
document.addEventListener("htmx:after:swap", () => {
  offline.hidden = true;
  updateButtons();
});

// On a narrow screen the menus scroll: show their current entry.
for (const entry of document.querySelectorAll("nav [aria-current=page]")) {
  entry.parentElement.scrollLeft = entry.offsetLeft - (entry.parentElement.clientWidth - entry.offsetWidth) / 2;
}

/** Whether a poll would disturb the reader: text is selected, or a menu is open. */
function isBusy() {
  const selection = document.getSelection();
  return (selection !== null && !selection.isCollapsed) || document.activeElement?.tagName === "SELECT";
}

/** Enables buttons that need checked boxes. Without JavaScript, they are always enabled and the server checks. */
function updateButtons() {
  for (const button of document.querySelectorAll("button[data-needs]")) {
    const boxes = button.form?.querySelectorAll(`input[name="${button.dataset.needs}"]:checked`) ?? [];
    button.disabled = boxes.length < Number(button.dataset.least);
  }
}
document.addEventListener("change", updateButtons);
window.addEventListener("pageshow", updateButtons);
updateButtons();

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("button.copy");
  if (!button) return;
  const text = button.dataset.copy ?? document.querySelector(button.dataset.copyFrom)?.textContent ?? "";
  const label = button.textContent;
  button.textContent = (await copy(text)) ? "Copied" : "Press Ctrl+C";
  setTimeout(() => { button.textContent = label; }, 1500);
});

/** Copies text. Browsers have no clipboard on plain http to another machine, so there the text is selected instead. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "hidden";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

document.addEventListener("submit", (event) => {
  const question = event.target.dataset?.confirm;
  if (question && !window.confirm(question)) event.preventDefault();
});

// A page without data reloads when its first data arrives.
const awaited = document.querySelector("[data-await]");
if (awaited) {
  const timer = setInterval(async () => {
    if (document.hidden) return;
    const answer = await fetch(awaited.dataset.await).catch(() => null);
    if (answer?.ok && (await answer.json()).total > 0) {
      clearInterval(timer);
      location.reload();
    }
  }, 1500);
}
