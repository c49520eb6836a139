"use strict";
(() => {
  const every = Number(document.body.dataset.refreshMs);
  const age = document.getElementById("age");
  const pause = document.createElement("button");
  let paused = false;
  pause.type = "button";
  pause.className = "plain";
  pause.textContent = "pause";
  pause.onclick = () => {
    paused = !paused;
    pause.textContent = paused ? "resume" : "pause";
  };
  age.append(" ", pause);

  const isSelecting = (live) => {
    const selection = document.getSelection();
    return selection.type === "Range" && live.contains(selection.anchorNode);
  };

  const refresh = async () => {
    const live = document.getElementById("live");
    if (paused || document.hidden || isSelecting(live)) return;
    const fresh = document.getElementById("fresh");
    try {
      const answer = await fetch(location.pathname, { cache: "no-store" });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const open = [...live.querySelectorAll("details[open]")].map((one) => one.id);
      const scrolled = [...live.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
      live.replaceWith(page.getElementById("live"));
      for (const id of open) document.getElementById(id)?.setAttribute("open", "");
      document.querySelectorAll("#live .scroll").forEach((one, i) => { one.scrollLeft = scrolled[i] ?? 0; });
      fresh.replaceWith(page.getElementById("fresh"));
    } catch (error) {
      fresh.classList.add("bad");
      if (!fresh.dataset.failed) fresh.append(`; no answer since (${error.message})`);
      fresh.dataset.failed = "yes";
    }
  };

  const next = () => setTimeout(async () => { await refresh(); next(); }, every);
  next();
})();
