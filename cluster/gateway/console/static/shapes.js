// Privacy masks and zones, drawn on the camera's picture with pointer or keyboard. Corners are fractions of its size.
import { html, useRef, useState } from "./dom.js";
import { plural } from "./format.js";
import { Picture, useAttempt } from "./parts.js";

const STEP = 0.01;
const LARGE_STEP = 0.05;
const CLOSE = 0.03;
const MOST_CORNERS = 256;
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

const within = (value) => Math.round(1000 * Math.min(1, Math.max(0, value))) / 1000;
const shown = (share) => `${Math.round(100 * share)} %`;
const COLOURS = ["red", "yellow", "blue", "green"];
export const MASKS = {
  noun: "mask", label: "Draw a privacy mask", most: 32, nameOf: (index) => `Mask ${index + 1}`, colourOf: () => "",
  says: "Masked areas are blacked out before any processing.",
};
export const ZONES = {
  noun: "zone", label: "Draw a zone", most: COLOURS.length, nameOf: (index) => `Zone ${index + 1}, ${COLOURS[index]}`, colourOf: (index) => COLOURS[index],
  says: "The model sees the outlines of zones; questions name them by colour, as in “Is anyone inside the red zone?”.",
};
const points = (corners) => corners.map(([x, y]) => `${1000 * x},${1000 * y}`).join(" ");

export function ShapeEditor({ camera, kind, shapes, onSave }) {
  const { noun } = kind;
  const [done, setDone] = useState(shapes);
  const [open, setOpen] = useState([]);
  const [cross, setCross] = useState([0.5, 0.5]);
  const [said, setSaid] = useState("");
  const [attempt, busy, error] = useAttempt();
  const frame = useRef(null);
  const dragged = useRef(null);
  const full = done.length >= kind.most;

  const place = (event) => {
    const box = frame.current.getBoundingClientRect();
    return [within((event.clientX - box.left) / box.width), within((event.clientY - box.top) / box.height)];
  };
  const close = () => {
    if (open.length < 3) return setSaid(`A ${noun} needs at least three corners.`);
    setDone([...done, open]);
    setOpen([]);
    setSaid(`${kind.nameOf(done.length)} is drawn; save to apply it.`);
  };
  const corner = (at) => {
    if (full || open.length >= MOST_CORNERS) return;
    const [first] = open;
    if (open.length >= 3 && Math.hypot(first[0] - at[0], first[1] - at[1]) < CLOSE) return close();
    setOpen([...open, at]);
    setSaid(`Corner ${open.length + 1} at ${shown(at[0])} across, ${shown(at[1])} down.`);
  };
  const move = (shape, index, at) => setDone(done.map((corners, i) => (i === shape ? corners.map((each, j) => (j === index ? at : each)) : corners)));
  const onKeyDown = (event) => {
    if (event.target !== event.currentTarget) return;
    const arrow = ARROWS[event.key];
    const step = event.shiftKey ? LARGE_STEP : STEP;
    if (arrow) {
      const at = [within(cross[0] + step * arrow[0]), within(cross[1] + step * arrow[1])];
      setCross(at);
      setSaid(`${shown(at[0])} across, ${shown(at[1])} down`);
    } else if (event.key === "Enter" || event.key === " ") corner(cross);
    else if (event.key === "Backspace") setOpen(open.slice(0, -1));
    else if (event.key === "c") close();
    else if (event.key === "Escape") setOpen([]);
    else return;
    event.preventDefault();
  };
  const onCornerKey = (event, shape, index) => {
    const arrow = ARROWS[event.key];
    if (!arrow) return;
    const step = event.shiftKey ? LARGE_STEP : STEP;
    const [x, y] = done[shape][index];
    move(shape, index, [within(x + step * arrow[0]), within(y + step * arrow[1])]);
    event.preventDefault();
  };
  const save = async () => {
    await onSave(done);
    setSaid(done.length ? `${plural(done.length, noun)} saved.` : `Saved without ${noun}s.`);
  };
  return html`<div class="masks">
    <p class="soft">${kind.says} Click corners on the picture, and the first corner again to close the shape. With the keyboard: arrows move the cross, Enter sets a corner, C closes the shape, Backspace removes the last corner.</p>
    <div class="mask-frame" ref=${frame}>
      <${Picture} camera=${camera} width=${640} />
      <svg class="mask-canvas" viewBox="0 0 1000 1000" preserveAspectRatio="none" tabindex="0" role="application" aria-label=${kind.label} aria-describedby=${`${noun}-said`}
        onKeyDown=${onKeyDown}
        onPointerDown=${(event) => event.target === event.currentTarget && event.button === 0 && (setCross(place(event)), corner(place(event)))}
        onPointerMove=${(event) => dragged.current && move(...dragged.current, place(event))}
        onPointerUp=${() => (dragged.current = null)}>
        ${done.map((corners, shape) => html`<g key=${shape} class=${`mask ${kind.colourOf(shape)}`}>
          <polygon points=${points(corners)} />
          ${corners.map(([x, y], index) => html`<circle key=${index} cx=${1000 * x} cy=${1000 * y} r="12" tabindex="0" role="button"
            aria-label=${`Corner ${index + 1} of ${noun} ${shape + 1}, ${shown(x)} across, ${shown(y)} down; arrows move it`}
            onKeyDown=${(event) => onCornerKey(event, shape, index)}
            onPointerDown=${(event) => (event.preventDefault(), event.currentTarget.ownerSVGElement.setPointerCapture(event.pointerId), (dragged.current = [shape, index]))} />`)}
        </g>`)}
        ${open.length > 0 && html`<g class="mask open"><polyline points=${points([...open, cross])} />
          ${open.map(([x, y], index) => html`<circle key=${index} cx=${1000 * x} cy=${1000 * y} r="10" />`)}</g>`}
        <path class="mask-cross" d=${`M${1000 * cross[0] - 24} ${1000 * cross[1]}h48M${1000 * cross[0]} ${1000 * cross[1] - 24}v48`} />
      </svg>
    </div>
    <p id=${`${noun}-said`} class="soft" role="status">${said || (full ? `The limit of ${kind.most} ${noun}s is reached.` : "No corner is set yet.")}</p>
    <div class="actions">
      <button type="button" class="button" disabled=${open.length < 3} onClick=${close}>Close the shape</button>
      <button type="button" class="button" disabled=${!open.length} onClick=${() => setOpen(open.slice(0, -1))}>Remove last corner</button>
      <button type="button" class="button primary" disabled=${busy || open.length > 0} onClick=${() => attempt(save)}>Save ${noun}s</button>
    </div>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <ul class="plain">${done.map((corners, shape) => html`<li key=${shape}>${kind.nameOf(shape)}, ${plural(corners.length, "corner")}
      <button type="button" class="button small" aria-label=${`Remove ${noun} ${shape + 1}`} onClick=${() => setDone(done.filter((_, i) => i !== shape))}>Remove</button></li>`)}</ul>
  </div>`;
}
