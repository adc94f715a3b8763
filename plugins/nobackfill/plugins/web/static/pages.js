// What plain links and forms cannot do: a picture that is chosen, dropped or pasted is sent as it is, a text too,
// and arrow keys walk through tiles.
(() => {
  const say = (place, sentence) => {
    const note = document.createElement("p");
    note.className = "notice wrong";
    note.setAttribute("role", "alert");
    note.textContent = sentence;
    place.replaceChildren(note);
  };

  const sendPicture = (form, picture) => {
    if (picture && picture.type.startsWith("image/")) {
      send(form, picture, "application/octet-stream");
    } else {
      say(document.querySelector(form.dataset.results), form.elements.picture
        ? "That is no picture: expected a JPEG, PNG or WebP file."
        : "Expected a text to search for.");
    }
  };

  const send = async (form, body, kind) => {
    const place = document.querySelector(form.dataset.results);
    place.setAttribute("aria-busy", "true");
    const asked = new URLSearchParams(new FormData(form));
    asked.delete("picture");
    asked.delete("text");
    try {
      const answer = await fetch(`${form.dataset.action}?${asked}`, {
        method: "POST", body, headers: { "Content-Type": kind, "HX-Request": "true" },
      });
      place.innerHTML = await answer.text();
      window.htmx.process(place);
      const heading = place.querySelector("h2");
      if (heading) { heading.tabIndex = -1; heading.focus(); }
    } catch {
      say(place, "The server does not answer. Is it still running?");
    } finally {
      place.removeAttribute("aria-busy");
    }
  };

  const form = document.querySelector("form[data-action]");
  if (form) {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = form.elements.text?.value.trim();
      if (text) send(form, text, "text/plain; charset=utf-8");
      else sendPicture(form, form.elements.picture?.files[0]);
    });
    form.elements.picture?.addEventListener("change", (event) => {
      if (event.target.files.length) sendPicture(form, event.target.files[0]);
    });
    addEventListener("dragover", (event) => { event.preventDefault(); form.classList.add("over"); });
    addEventListener("dragleave", () => form.classList.remove("over"));
    addEventListener("drop", (event) => {
      event.preventDefault();
      form.classList.remove("over");
      if (event.dataTransfer.files.length) sendPicture(form, event.dataTransfer.files[0]);
    });
    addEventListener("paste", (event) => {
      if (event.clipboardData.files.length) sendPicture(form, event.clipboardData.files[0]);
    });
  }

  addEventListener("keydown", (event) => {
    const tile = document.activeElement?.closest?.(".tile");
    if (!tile || !event.key.startsWith("Arrow")) return;
    const tiles = [...document.querySelectorAll(".tile")];
    const at = tiles.indexOf(tile);
    const { top, left } = tile.getBoundingClientRect();
    const beyond = (other, down) => {
      const box = other.getBoundingClientRect();
      return (down ? box.top > top + 4 : box.top < top - 4) && Math.abs(box.left - left) < 4;
    };
    const next = {
      ArrowRight: () => tiles[at + 1],
      ArrowLeft: () => tiles[at - 1],
      ArrowDown: () => tiles.slice(at + 1).find((other) => beyond(other, true)),
      ArrowUp: () => tiles.slice(0, at).reverse().find((other) => beyond(other, false)),
    }[event.key]();
    if (next) { event.preventDefault(); next.focus(); }
  });
})();
