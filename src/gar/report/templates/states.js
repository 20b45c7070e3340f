// A slider over the updates at which heatmaps were measured. Without this script the last one is shown.
"use strict";
document.querySelectorAll("[data-updates]").forEach((drawing) => {
  const updates = drawing.dataset.updates.split(" ");
  const meshes = [...drawing.querySelectorAll("[data-states]")].map((group) => ({
    cells: [...group.querySelectorAll("path")],
    states: group.dataset.states.split(" "),
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
