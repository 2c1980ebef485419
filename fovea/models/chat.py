"""Messages → a reply of an OpenAI-compatible endpoint: cached by content, retried, counted.

Judges (`fovea.metrics.judge`) and API generators share it. The key comes from the environment and from
nowhere else, and is in no message, file or error that leaves this module.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

Message = Mapping[str, Any]
Item = TypeVar("Item")
Result = TypeVar("Result")


class ChatError(RuntimeError):
    """The endpoint gave no reply, after all retries; the message says what it did instead."""


@dataclass(frozen=True)
class Reply:
    """What came back.

    Attributes:
        text: of the first choice; may be empty.
        prompt_tokens: as the endpoint counts them.
        completion_tokens: as the endpoint counts them.
        cached: it was in the cache, and cost nothing now.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    cached: bool = False


@dataclass
class Usage:
    """What a client has spent since it was made.

    Attributes:
        calls: replies that the endpoint gave.
        cached: replies from the cache.
        retries: requests that had to be sent again (429, 5xx, time-outs, lost connections).
        failures: requests given up.
        prompt_tokens: of `calls`.
        completion_tokens: of `calls`.
        dollars: of `calls`, or None where no prices are known.
    """

    calls: int = 0
    cached: int = 0
    retries: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    dollars: float | None = None


class ChatClient:
    """One model at one endpoint; may be shared by threads."""

    def __init__(
        self,
        model: str | None = None,
        base_url: str | None = None,
        key_variable: str = "OPENAI_API_KEY",
        cache: str | Path | None = None,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        timeout: float = 60.0,
        max_retries: int = 5,
        concurrency: int = 8,
        max_image_bytes: int = 4_000_000,
        prices: tuple[float, float] | None = None,
    ) -> None:
        """Constructor arguments are the config; nothing is sent yet.

        Args:
            model: the endpoint's name of it; None takes `OPENAI_MODEL` from the environment.
            base_url: of the endpoint, `https://…/v1`; None takes `OPENAI_BASE_URL`, or the library's default.
            key_variable: environment variable that holds the key.
            cache: directory of replies by content; None keeps none. A re-run over a cache costs nothing.
            temperature: 0 for judges.
            max_tokens: of a reply.
            timeout: seconds of one request.
            max_retries: of one request, with exponential back-off (the client library's, which honours
                Retry-After).
            concurrency: requests at once, in `map`.
            max_image_bytes: largest image file that is sent.
            prices: US dollars for a million prompt and completion tokens, for the count of costs.
        """
        name = model or os.environ.get("OPENAI_MODEL")
        if not name:
            raise ValueError("no model: pass model=…, or set OPENAI_MODEL in the environment")
        least = {"max_tokens": max_tokens, "concurrency": concurrency, "max_image_bytes": max_image_bytes}
        if wrong := [f"{key}={value}" for key, value in least.items() if value < 1]:
            raise ValueError(f"{', '.join(wrong)}: at least 1")
        if not timeout > 0 or max_retries < 0:
            raise ValueError(f"timeout={timeout} must be positive, max_retries={max_retries} at least 0")
        self.model: str = name
        self.base_url = base_url or os.environ.get("OPENAI_BASE_URL")
        self.key_variable = key_variable
        self.settings = {"temperature": temperature, "max_tokens": max_tokens}
        self.timeout, self.max_retries, self.concurrency = timeout, max_retries, concurrency
        self.max_image_bytes, self.prices = max_image_bytes, prices
        self.usage = Usage(dollars=None if prices is None else 0.0)
        self._cache = None if cache is None else Path(cache)
        self._lock = threading.Lock()
        self._client: Any = None

    def reply(self, messages: Sequence[Message], *, attempt: int = 0) -> Reply:
        """Send messages in the chat format, or find their reply in the cache.

        Args:
            messages: `{"role": …, "content": …}`; pictures as `image_part` makes them.
            attempt: a number that is part of the cache's key, so that a reply which could not be used can be
                asked for again.

        Raises:
            ChatError: no reply after all retries, or a refusal that retrying does not change (401, 404, …).
        """
        path = self._place(messages, attempt)
        if path is not None and (known := self._read(path)) is not None:
            with self._lock:
                self.usage.cached += 1
            return known
        reply = self._ask(messages)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            writing = path.with_name(f".{path.stem}.{uuid.uuid4().hex}")
            writing.write_text(json.dumps(asdict(reply), ensure_ascii=False))
            os.replace(writing, path)
        return reply

    def map(self, work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """`work` of every item, in their order, at most `concurrency` at once; an error is raised in its
        place.
        """
        with ThreadPoolExecutor(self.concurrency) as pool:
            yield from pool.map(work, items)

    def image_part(self, data: bytes, media_type: str) -> dict[str, Any]:
        """The bytes of an image file as a part of a message (a data URL).

        Raises:
            ValueError: it is larger than `max_image_bytes`, or no image type that endpoints take.
        """
        if media_type not in ("image/jpeg", "image/png", "image/webp", "image/gif"):
            raise ValueError(f"{media_type}: send a JPEG, PNG, WebP or GIF")
        if len(data) > self.max_image_bytes:
            raise ValueError(
                f"an image of {len(data):,} bytes is larger than max_image_bytes={self.max_image_bytes:,}; "
                "scale it down, or raise the limit"
            )
        text = base64.b64encode(data).decode("ascii")
        return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{text}"}}

    def _place(self, messages: Sequence[Message], attempt: int) -> Path | None:
        if self._cache is None:
            return None
        what = [self.base_url, self.model, self.settings, list(messages), attempt]
        key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        return self._cache / key[:2] / f"{key}.json"

    @staticmethod
    def _read(path: Path) -> Reply | None:
        """A cached reply; a torn or foreign file counts as absent, and is written again."""
        try:
            fields = json.loads(path.read_text())
            return Reply(**(fields | {"cached": True}))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _ask(self, messages: Sequence[Message]) -> Reply:
        import openai

        client = self._connect()
        try:
            raw = client.chat.completions.with_raw_response.create(
                model=self.model, messages=list(messages), **self.settings
            )
            retries = int(raw.retries_taken)
            answer = raw.parse()
            text = answer.choices[0].message.content or ""
            tokens = answer.usage
        except (openai.OpenAIError, ValueError, AttributeError, IndexError, TypeError) as error:
            # Also a body that is no JSON, or JSON of another shape: no OpenAI-compatible endpoint.
            with self._lock:
                self.usage.failures += 1
            raise ChatError(self._scrub(f"{self.model}: {type(error).__name__}: {error}")) from None
        reply = Reply(
            text, getattr(tokens, "prompt_tokens", 0) or 0, getattr(tokens, "completion_tokens", 0) or 0
        )
        with self._lock:
            usage = self.usage
            usage.calls += 1
            usage.retries += retries
            usage.prompt_tokens += reply.prompt_tokens
            usage.completion_tokens += reply.completion_tokens
            if self.prices is not None:
                cost = self.prices[0] * reply.prompt_tokens + self.prices[1] * reply.completion_tokens
                usage.dollars = (usage.dollars or 0.0) + cost / 1e6
        return reply

    def _connect(self) -> Any:
        with self._lock:
            if self._client is None:
                import openai

                key = os.environ.get(self.key_variable)
                if not key:
                    raise ValueError(
                        f"no key: set {self.key_variable} in the environment (any text for a local server)"
                    )
                self._client = openai.OpenAI(
                    api_key=key, base_url=self.base_url, timeout=self.timeout, max_retries=self.max_retries
                )
            return self._client

    def _scrub(self, text: str) -> str:
        """Endpoints repeat the key, whole or in part, in their messages."""
        key = os.environ.get(self.key_variable, "")
        return text.replace(key, "***")[:500] if key else text[:500]
