// Sorting tables and hiding methods. The page reads complete without this script. Both are kept in the address:
// #sort=<table id>:<column>:<asc|desc>&hide=<method>,<method>
"use strict";
(() => {
  const state = { sort: null, hide: new Set() };

  const value = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    return cell.classList.contains("number") ? null : cell.textContent.trim();
  };

  const compare = (a, b) => {
    if (a === null || b === null) return 0;
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  };

  const order = (table, column, direction) => {
    const body = table.tBodies[0];
    const rows = table.original.map((row) => ({ row, key: value(row, column) }));
    const sign = direction === "desc" ? -1 : 1;
    if (direction) {
      rows.sort((x, y) => (x.key === null) - (y.key === null) || sign * compare(x.key, y.key));
    }
    body.append(...rows.map((entry) => entry.row));
    table.classList.toggle("sorted", Boolean(direction));
    [...table.tHead.rows[0].cells].forEach((head, index) => {
      if (index === column && direction) {
        head.setAttribute("aria-sort", direction === "desc" ? "descending" : "ascending");
      } else {
        head.removeAttribute("aria-sort");
      }
    });
  };

  const hide = () => {
    document.querySelectorAll("[data-variant]").forEach((element) => {
      const names = element.dataset.variant.split(" ");
      element.classList.toggle("hidden", names.some((name) => state.hide.has(name)));
    });
    document.querySelectorAll("#methods input").forEach((box) => {
      box.checked = !state.hide.has(box.value);
    });
  };

  const remember = () => {
    const parts = [];
    if (state.sort) parts.push(`sort=${state.sort.join(":")}`);
    if (state.hide.size) parts.push(`hide=${[...state.hide].join(",")}`);
    try {
      history.replaceState(null, "", parts.length ? `#${parts.join("&")}` : location.pathname + location.search);
    } catch {
      // Some viewers forbid it; sorting works all the same.
    }
  };

  const recall = () => {
    const wanted = new URLSearchParams(location.hash.slice(1));
    if (wanted.has("hide")) state.hide = new Set(wanted.get("hide").split(",").filter(Boolean));
    if (wanted.has("sort")) {
      const [name, column, direction] = wanted.get("sort").split(":");
      const table = document.getElementById(name);
      if (table && table.original && table.tHead.rows[0].cells[Number(column)]) {
        state.sort = [name, Number(column), direction === "desc" ? "desc" : "asc"];
        order(table, state.sort[1], state.sort[2]);
      }
    }
    hide();
  };

  document.querySelectorAll("table").forEach((table) => {
    table.original = [...table.tBodies[0].rows];
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      button.addEventListener("click", () => {
        const first = head.classList.contains("number") ? "desc" : "asc";
        const now = { ascending: "asc", descending: "desc" }[head.getAttribute("aria-sort")];
        const next = now === undefined ? first : now === first ? (first === "asc" ? "desc" : "asc") : null;
        order(table, column, next);
        state.sort = next ? [table.id, column, next] : null;
        remember();
      });
      head.replaceChildren(button);
    });
  });

  const names = new Map(JSON.parse(document.getElementById("variants").textContent));
  if (names.size > 1) {
    const box = document.createElement("fieldset");
    const legend = document.createElement("legend");
    legend.textContent = "Methods shown in tables and figures";
    box.append(legend);
    names.forEach((name, slug) => {
      const label = document.createElement("label");
      const input = document.createElement("input");
      input.type = "checkbox";
      input.value = slug;
      input.checked = true;
      input.addEventListener("change", () => {
        if (input.checked) state.hide.delete(slug);
        else state.hide.add(slug);
        hide();
        remember();
      });
      label.append(input, ` ${name}`);
      box.append(label);
    });
    document.getElementById("methods").append(box);
  }

  addEventListener("hashchange", recall);
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details.record").forEach((details) => { details.open = true; });
  });
  recall();
})();
