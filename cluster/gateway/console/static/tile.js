// One camera on the wall.
import { isSilent, topAnswer } from "./attention.js";
import { html } from "./dom.js";
import { useHistory } from "./fetching.js";
import { score, words } from "./format.js";
import { Badge, Picture, RungBadge, StateBadge } from "./parts.js";
import { Sparkline } from "./sparkline.js";

export function Tile({ camera, seen, reachable, onFocus }) {
  const history = useHistory(camera.name);
  const top = topAnswer(camera);
  const { incident } = seen;
  const running = camera.state === "running";
  return html`<a class=${`tile tone-${seen.tone}`} href=${`#/camera/${encodeURIComponent(camera.name)}`} data-camera=${camera.name}
      tabindex=${reachable ? 0 : -1} onFocus=${onFocus}>
    <div class="tile-picture">
      <${Picture} camera=${camera.name} />
      <div class="tile-badges">
        ${incident && html`<${Badge} tone=${seen.tone}>${words(incident.subject)}${incident.acknowledged_by ? ", acknowledged" : ""}<//>`}
        ${(!running || isSilent(camera)) && html`<${StateBadge} camera=${camera} />`}
        <${RungBadge} camera=${camera} />
      </div>
    </div>
    <div class="tile-text">
      <div class="tile-name"><span class="dot" aria-hidden="true"></span><span class="cut" title=${camera.name}><bdi>${camera.name}</bdi></span></div>
      ${top && (running || !camera.reason)
        ? html`<div class="tile-answer"><span class="cut">${words(top.question)}</span>
            <span class=${`tile-score ${top.positive && running ? "yes" : ""}`}>${top.positive ? "yes " : ""}${score(top.score)}</span></div>`
        : html`<div class="tile-answer"><span class="cut soft">${camera.reason || "No answer yet"}</span></div>`}
      <${Sparkline} history=${history} question=${top?.question} />
    </div>
  </a>`;
}
