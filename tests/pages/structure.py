"""What a page looks like as boxes rather than pixels: the same with any fonts, on any machine.

A line for each block from top to bottom: what it is, what it says that never changes, and how many
of its children stand side by side. structure.json beside this file holds what was looked at.
"""

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

_KEPT = Path(__file__).with_name("structure.json")
_SEEN = """() => {
    const lines = [], faults = [];
    const box = element => element.getBoundingClientRect();
    const shown = element => box(element).width > 1 && box(element).height > 1;
    const text = element => element.textContent.replace(/\\s+/g, " ").trim();
    const abreast = element => [...element.children].filter(shown)
        .filter((child, _, all) => Math.abs(box(child).top - box(all[0]).top) < 2).length;
    const what = {
        "nav": one => [...one.querySelectorAll("a")].map(text).join(", "),
        "h1, h2, h3": text,
        "form": one => [...one.querySelectorAll("label, button")].map(text).join(", "),
        "table": one => [...one.querySelectorAll("th[scope=col]")].map(text).join(", "),
        ".cards, .tiles, .two, .three": one => `${abreast(one)} side by side`,
        ".notice, progress, details, dl, img.photo, .chips": () => "",
    };
    for (const element of document.querySelectorAll(Object.keys(what).join(", "))) {
        if (!shown(element)) continue;
        const [, said] = Object.entries(what).find(([which]) => element.matches(which));
        const name = element.localName + (element.className && `.${element.classList[0]}`);
        lines.push(`${name} ${said(element)}`.trim());
    }
    // What scrolls by itself may be wider than the window; nothing else may be.
    for (const element of document.querySelectorAll("body *")) {
        if (element.closest(".wide *, .skip, .reading") || !shown(element)) continue;
        const { left, right } = box(element);
        if (left < -1 || right > innerWidth + 1)
            faults.push(`${element.localName} "${text(element).slice(0, 40)}" ${left} to ${right}`);
    }
    const parents = "body, header, main, form, .cards, .tiles, .two, .three, .tile, dl";
    for (const parent of document.querySelectorAll(parents)) {
        const children = [...parent.children].filter(one => shown(one) && !one.matches(".skip"));
        children.forEach((one, at) => children.slice(at + 1).forEach(other => {
            const [a, b] = [box(one), box(other)];
            const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            if (wide > 1 && high > 1)
                faults.push(`${one.localName} over ${other.localName} in ${parent.localName}`);
        }));
    }
    return { lines, faults };
}"""


def same(page: Page, name: str, width: int, kept_in: Path) -> None:
    """The page is as structure.json has it, nothing of it is cut off and nothing overlaps. Where it
    is not, a screenshot and the structure that was seen lie in `kept_in`."""
    seen: dict[str, Any] = page.evaluate(_SEEN)
    name = f"{name} {width}"
    page.screenshot(path=kept_in / f"{name}.png", full_page=True)
    (kept_in / f"{name}.json").write_text(json.dumps(seen["lines"], indent=1, ensure_ascii=False))
    where = f"{name}: see '{kept_in}/{name}.png' and .json beside it"
    assert not seen["faults"], where
    kept = json.loads(_KEPT.read_text(encoding="utf-8"))
    assert seen["lines"] == kept.get(name), where
