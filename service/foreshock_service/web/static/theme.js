// Before the first paint: the theme that was chosen here, if one was.
"use strict";
try {
  const chosen = localStorage.getItem("foreshock-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch { /* storage is switched off: as the system has it */ }
