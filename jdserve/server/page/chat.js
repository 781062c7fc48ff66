// The playground: a conversation, streamed.
import { ask } from "/page/ask.js";

const $ = (id) => document.getElementById(id);

function turn(role, text) {
  const root = document.createElement("div");
  const who = document.createElement("b");
  const said = document.createElement("span");
  root.className = `turn ${role}`;
  who.textContent = role === "user" ? "you" : role;
  said.textContent = text;
  root.append(who, said);
  $("log").append(root);
  root.scrollIntoView({ block: "nearest" });
  return { root, said };
}

// The JSON of each event of a stream, until its end mark.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

export function startChat(model) {
  const messages = [];
  let running = null;

  function busy(controller) {
    running = controller;
    $("send").disabled = controller !== null;
    $("stop").disabled = controller === null;
  }

  async function send(text) {
    const controller = new AbortController();
    busy(controller);
    turn("user", text);
    const { root, said } = turn("assistant", "");
    const began = performance.now();
    let first = 0, count = 0;
    try {
      const answer = await ask("/v1/chat/completions", {
        method: "POST",
        signal: controller.signal,
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({
          model: model(),
          messages: [...messages, { role: "user", content: text }],
          max_tokens: Number($("max-tokens").value),
          temperature: Number($("temperature").value),
          stream: true,
          stream_options: { include_usage: true },
        }),
      });
      for await (const event of events(answer)) {
        if (event.error) throw new Error(event.error.message);
        const piece = event.choices[0]?.delta?.content ?? "";
        first ||= piece ? performance.now() : 0;
        said.textContent += piece;
        count = event.usage?.completion_tokens ?? count;
        $("log").scrollTop = $("log").scrollHeight;
      }
      const seconds = (performance.now() - (first || began)) / 1000;
      const told = document.createElement("small");
      const speed = count > 1 && seconds > 0 ? `, ${((count - 1) / seconds).toFixed(1)} tokens/s after it` : "";
      told.textContent = `${count} tokens; the first after ${(((first || performance.now()) - began) / 1000).toFixed(2)} s${speed}`;
      root.append(told);
    } catch (error) {
      if (error.name !== "AbortError") turn("error", error.message);
    }
    if (said.textContent) messages.push({ role: "user", content: text }, { role: "assistant", content: said.textContent });
    busy(null);
  }

  $("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("text").value.trim();
    if (!text || running || !model()) return;
    $("text").value = "";
    send(text);
  });
  $("text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("chat-form").requestSubmit();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    $("log").replaceChildren();
    $("text").focus();
  });
}
