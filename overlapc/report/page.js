"use strict";
// The timeline: its buttons, and the wheel with Ctrl, zoom; it scrolls as anything does.
for (const lanes of document.querySelectorAll(".lanes")) {
  const scroll = lanes.querySelector(".scroll"), stretch = lanes.querySelector(".stretch");
  const boxes = [...stretch.querySelectorAll(".lane i")];
  let zoom = 1;
  const number = () => {  // a microbatch's number is shown where it has room
    const widths = boxes.map(box => box.getBoundingClientRect().width);
    boxes.forEach((box, i) => box.classList.toggle("tiny", widths[i] < 6 + 6.5 * box.textContent.length));
  };
  const show = (next, at) => {
    const point = scroll.scrollLeft + at;
    next = Math.min(64, Math.max(1, next));
    stretch.style.width = next * 100 + "%";
    scroll.scrollLeft = point * next / zoom - at;
    zoom = next;
    number();
  };
  for (const button of lanes.parentElement.querySelectorAll("[data-zoom]")) {
    const by = Number(button.dataset.zoom);
    button.addEventListener("click", () => show(by ? zoom * by : 1, scroll.clientWidth / 2));
  }
  scroll.addEventListener("wheel", event => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    show(zoom * (event.deltaY > 0 ? 0.8 : 1.25), event.clientX - scroll.getBoundingClientRect().left);
  }, {passive: false});
  addEventListener("resize", number);
  addEventListener("beforeprint", () => show(1, 0));
  number();
}

// Two layouts or plans side by side.
const sides = document.querySelector(".sides");
if (sides) {
  const every = JSON.parse(document.getElementById("founds").textContent);
  const picks = [...sides.querySelectorAll("select")];
  const rows = [...sides.querySelectorAll("tbody tr")];
  const show = () => picks.forEach((pick, side) => {
    const found = every[Number(pick.value)];
    rows.forEach((row, i) => {
      const cell = row.cells[side + 1];
      if (i) cell.textContent = found.cells[i - 1];
      else cell.querySelector(".bar").innerHTML = found.bar;
    });
  });
  for (const pick of picks) pick.addEventListener("change", show);
}

for (const button of document.querySelectorAll(".command button")) {
  if (!navigator.clipboard) { button.remove(); continue; }
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.parentElement.querySelector("pre").textContent);
    button.textContent = "copied";
  });
}
