// Apply the chosen theme before the first paint; without a choice the system's preference holds.
try {
  const theme = localStorage.getItem("quire:theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* storage is blocked */ }
