// Loaded before uPlot, which takes the browser's language as it is: under the C locale that is no language at all.
try { new Intl.NumberFormat(navigator.language); } catch { Object.defineProperty(navigator, "language", { value: "en-US" }); }
