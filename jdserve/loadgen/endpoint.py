"""What a run asks the server before the first request: is it there, which model, which token ids."""

from __future__ import annotations

from typing import Any

import httpx

from jdserve.loadgen.errors import BenchError

_TIMEOUT_S = 30.0


def base_url(url: str) -> str:
    """``url`` without a trailing slash or ``/v1``, so that both spellings of an OpenAI base URL work.

    Raises:
        BenchError: it is not an http(s) URL with a host.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise BenchError(f"--url: {error}, got {url!r}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise BenchError(f"--url: must be http://HOST[:PORT] or https://HOST[:PORT], got {url!r}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def find_model(url: str, model: str | None) -> str:
    """``model``, once the server is known to answer; the one model that it serves where ``model`` is None.

    Raises:
        BenchError: the server cannot be reached, or ``model`` is None and it does not serve exactly one.
    """
    reply = _ask("GET", f"{url}/v1/models")
    if model is not None:
        return model
    entries = _json(reply).get("data") if reply.is_success else None
    names = [entry["id"] for entry in entries or [] if isinstance(entry, dict) and "id" in entry]
    if len(names) != 1:
        said = f"{len(names)} models: {', '.join(names)}" if names else f"no model (HTTP {reply.status_code})"
        raise BenchError(f"--model: needed, {url}/v1/models names {said}")
    return names[0]


def tokenize(url: str, model: str, text: str) -> list[int]:
    """Token ids of ``text``, no special tokens added, from the server's ``POST /tokenize``.

    Raises:
        BenchError: the server has no such path, or answers something else.
    """
    reply = _ask("POST", f"{url}/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
    tokens = _json(reply).get("tokens") if reply.is_success else None
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise BenchError(
            f"--tokenizer: needed for exact prompt lengths, {url}/tokenize gives no tokens (HTTP {reply.status_code})"
        )
    return tokens


def _ask(method: str, url: str, body: dict[str, Any] | None = None) -> httpx.Response:
    try:
        # trust_env off: a proxy between the load and the server would be measured with it.
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as http:
            return http.request(method, url, json=body)
    except httpx.HTTPError as error:
        raise BenchError(f"--url: cannot reach {url}: {str(error) or type(error).__name__}") from None


def _json(reply: httpx.Response) -> dict[str, Any]:
    try:
        value = reply.json()
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
