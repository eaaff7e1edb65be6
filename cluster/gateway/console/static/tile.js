// One camera on the wall.
import { topAnswer } from "./attention.js";
import { html } from "./dom.js";
import { useHistory } from "./fetching.js";
import { duration, score, words } from "./format.js";
import { Badge, Picture, RungBadge, StateBadge } from "./parts.js";
import { Sparkline } from "./sparkline.js";

const STALE_S = 10;

export function Tile({ camera, seen, reachable, onFocus }) {
  const history = useHistory(camera.name);
  const top = topAnswer(camera);
  const { incident } = seen;
  const stale = camera.state === "running" && camera.last_frame_age_s > STALE_S;
  return html`<a class=${`tile tone-${seen.tone}`} href=${`#/camera/${encodeURIComponent(camera.name)}`} data-camera=${camera.name}
      tabindex=${reachable ? 0 : -1} onFocus=${onFocus}>
    <div class="tile-picture">
      <${Picture} camera=${camera.name} />
      <div class="tile-badges">
        ${incident && html`<${Badge} tone=${seen.tone}>${words(incident.subject)}${incident.acknowledged_by ? ", seen to" : ""}<//>`}
        ${camera.state !== "running" && html`<${StateBadge} camera=${camera} />`}
        ${stale && html`<${Badge} tone="warning">${duration(camera.last_frame_age_s)} old<//>`}
        <${RungBadge} camera=${camera} />
      </div>
    </div>
    <div class="tile-text">
      <div class="tile-name"><span class="dot" aria-hidden="true"></span><span class="cut" title=${camera.name}>${camera.name}</span></div>
      ${top
        ? html`<div class="tile-answer"><span class="cut">${words(top.question)}</span>
            <span class=${`tile-score ${top.positive && camera.state === "running" ? "yes" : ""}`}>${top.positive ? "yes " : ""}${score(top.score)}</span></div>`
        : html`<div class="tile-answer"><span class="cut soft">${camera.reason || "No answer yet"}</span></div>`}
      <${Sparkline} history=${history} question=${top?.question} />
    </div>
  </a>`;
}
