// Exports of the vendored libraries: templates, state, effects.
// Text and attributes of a template become text nodes and properties, never markup, so values need no escaping.
import { Fragment, h, render } from "./vendor/preact.js";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { Fragment, render, useEffect, useLayoutEffect, useMemo, useRef, useState };
