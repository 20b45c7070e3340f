// Sorting tables and hiding methods. The page reads complete without this script. Both are kept in the address:
// #<id of a place>&sort=<table id>:<column>:<asc|desc>&hide=<method>,<method>
"use strict";
(() => {
  const state = { place: "", sort: null, hide: new Set() };

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

  // Rows stay within their block (a mixture), and blocks in their order; the first column sorts the blocks.
  const order = (table, column, direction) => {
    const sign = direction === "desc" ? -1 : 1;
    const sorted = (entries) =>
      direction ? entries.sort((x, y) => (x.key === null) - (y.key === null) || sign * compare(x.key, y.key)) : entries;
    const blocks = table.blocks.map((rows) => ({
      key: value(rows[0], column),
      rows: sorted(rows.map((row) => ({ row, key: value(row, column) }))).map((entry) => entry.row),
    }));
    const whole = column === 0 ? sorted(blocks) : blocks;
    whole.forEach((block, place) => {
      block.rows.forEach((row, index) => row.classList.toggle("block", place > 0 && index === 0));
      table.tBodies[0].append(...block.rows);
    });
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
    document.querySelectorAll(".panels svg").forEach((panel) => {
      const parts = [...panel.children].filter((child) => child.localName === "g");
      panel.classList.toggle("hidden", parts.length > 0 && parts.every((part) => part.classList.contains("hidden")));
    });
    // What has nothing left to show goes as a whole: a table, then the part of the page around it.
    document.querySelectorAll(".table").forEach((box) => {
      const empty = [...box.querySelector("table").tBodies[0].rows].every((row) => row.classList.contains("hidden"));
      (box.closest("details") ?? box).classList.toggle("hidden", empty);
    });
    document.querySelectorAll("section.part").forEach((part) => {
      part.classList.toggle("hidden", [...part.children].slice(1).every((child) => child.classList.contains("hidden")));
    });
    document.querySelectorAll("#methods input").forEach((box) => {
      box.checked = !state.hide.has(box.value);
    });
  };

  const address = () => {
    const parts = state.place ? [state.place] : [];
    if (state.sort) parts.push(`sort=${state.sort.join(":")}`);
    if (state.hide.size) parts.push(`hide=${[...state.hide].join(",")}`);
    return parts.length ? `#${parts.join("&")}` : location.pathname + location.search;
  };

  const remember = (how) => {
    try {
      history[how](null, "", address());
    } catch {
      // Some viewers forbid it; sorting works all the same.
    }
  };

  const visit = (place) => {
    const target = place && document.getElementById(place);
    if (!target) return;
    for (let box = target.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
    target.scrollIntoView();
  };

  const recall = () => {
    const parts = decodeURIComponent(location.hash.slice(1)).split("&");
    state.place = parts[0] && !parts[0].includes("=") ? parts[0] : "";
    const wanted = new Map(parts.filter((part) => part.includes("=")).map((part) => part.split("=", 2)));
    state.hide = new Set((wanted.get("hide") ?? "").split(",").filter(Boolean));
    const [name, column, direction] = (wanted.get("sort") ?? "").split(":");
    const table = document.getElementById(name);
    if (state.sort) order(document.getElementById(state.sort[0]), state.sort[1], null);
    state.sort = null;
    if (table && table.blocks && table.tHead.rows[0].cells[Number(column)]) {
      state.sort = [name, Number(column), direction === "desc" ? "desc" : "asc"];
      order(table, state.sort[1], state.sort[2]);
      if (!state.place && table.closest("details")) table.closest("details").open = true;
    }
    hide();
    if (parts.length > 1) visit(state.place); // a lone place is where the browser goes by itself
  };

  document.querySelectorAll("table").forEach((table) => {
    table.blocks = [];
    [...table.tBodies[0].rows].forEach((row) => {
      if (row.classList.contains("block") || !table.blocks.length) table.blocks.push([]);
      table.blocks.at(-1).push(row);
    });
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      button.addEventListener("click", () => {
        const first = head.classList.contains("number") ? "desc" : "asc";
        const now = { ascending: "asc", descending: "desc" }[head.getAttribute("aria-sort")];
        const next = now === undefined ? first : now === first ? (first === "asc" ? "desc" : "asc") : null;
        if (state.sort && state.sort[0] !== table.id) order(document.getElementById(state.sort[0]), state.sort[1], null);
        order(table, column, next);
        state.sort = next ? [table.id, column, next] : null;
        remember("replaceState");
      });
      head.replaceChildren(button);
    });
  });

  const names = new Map(JSON.parse(document.getElementById("variants").textContent));
  if (names.size > 1) {
    const box = document.createElement("fieldset");
    const legend = document.createElement("legend");
    legend.textContent = "Methods shown in tables and figures (sentences and the coefficient sweep keep all)";
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
        remember("replaceState");
      });
      label.append(input, ` ${name}`);
      box.append(label);
    });
    document.getElementById("methods").append(box);
  }

  addEventListener("hashchange", recall);
  // A link of the contents changes the place alone.
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    state.place = link.getAttribute("href").slice(1);
    event.preventDefault();
    remember("pushState");
    visit(state.place);
  });

  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    folded.forEach((details) => { details.open = true; });
  });
  addEventListener("afterprint", () => folded.forEach((details) => { details.open = false; }));
  recall();
})();
