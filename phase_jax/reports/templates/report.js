"use strict";
// Without this script everything is shown, and light or dark follows the system.
const root = document.documentElement;
const chosen = { view: "all", protocol: "all" };

function show() {
  for (const element of document.querySelectorAll("main [data-view], main [data-protocol]")) {
    element.hidden = Object.entries(chosen).some(
      ([group, value]) => value !== "all" && element.dataset[group] && element.dataset[group] !== value,
    );
  }
}

for (const button of document.querySelectorAll("[data-choose]")) {
  button.addEventListener("click", () => {
    chosen[button.dataset.choose] = button.dataset.value;
    for (const other of document.querySelectorAll(`[data-choose="${button.dataset.choose}"]`)) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    show();
  });
}

const system = matchMedia("(prefers-color-scheme: dark)");
const theme = document.getElementById("theme");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
const pressTheme = () => theme.setAttribute("aria-pressed", String(isDark()));
theme.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  pressTheme();
});
system.addEventListener("change", pressTheme);
pressTheme();
document.querySelector(".toolbar").hidden = false;
