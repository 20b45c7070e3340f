// A slider over the updates at which heatmaps and cosines were measured. Without this script the last one is shown.
"use strict";
document.querySelectorAll("[data-updates]").forEach((drawing) => {
  const updates = drawing.dataset.updates.split(" ");
  const meshes = [...drawing.querySelectorAll("[data-states]")].map((group) => ({
    cells: [...group.querySelectorAll("path")].filter((cell) => cell.style.fill !== "none"),
    states: group.dataset.states.split(" "),
  }));
  const texts = [...drawing.querySelectorAll("[data-words]")].map((group) => ({
    text: group.localName === "text" ? group : group.querySelector("text"),
    words: group.dataset.words.split("|"),
  }));
  const label = document.createElement("label");
  const slider = document.createElement("input");
  const said = document.createElement("output");
  const show = () => {
    const at = Number(slider.value);
    const words = `update ${updates[at]} of ${updates[updates.length - 1]}`;
    said.textContent = words;
    slider.setAttribute("aria-valuetext", words);
    meshes.forEach(({ cells, states }) => {
      cells.forEach((cell, number) => {
        cell.style.fill = `#${states[at].slice(6 * number, 6 * number + 6)}`;
      });
    });
    texts.forEach(({ text, words }) => {
      text.textContent = words[at];
      text.style.fill = Math.abs(Number(words[at].replace("−", "-"))) > 0.7 ? "white" : "black";
    });
  };
  slider.type = "range";
  slider.min = "0";
  slider.max = slider.value = String(updates.length - 1);
  slider.addEventListener("input", show);
  label.className = "states";
  label.append("During training", slider, said);
  drawing.before(label);
  show();
});
