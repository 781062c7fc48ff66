"""A scripted completions server on a real socket: it answers as the test says, when the test says."""

import asyncio
import json
import threading


class Reply:
    """One answer being written; scripts call its methods."""

    def __init__(self, reader, writer, request, index):
        self.reader = reader
        self.writer = writer
        self.request = request
        self.index = index  # of the request, in order of arrival

    async def raw(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def read_to_the_end(self):
        """Close our side and wait until the client, done with the answer, closes its own."""
        self.writer.write_eof()
        await self.reader.read()

    async def head(self, status=200):
        await self.raw(b"HTTP/1.1 %d X\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" % status)

    async def event(self, value):
        await self.raw(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")

    async def token(self, text=" a", finish=None):
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})

    async def end(self, output_tokens=None, prompt_tokens=None):
        usage = {
            "prompt_tokens": prompt_tokens or len(self.request["prompt"]),
            "completion_tokens": output_tokens or self.request["max_tokens"],
        }
        await self.event({"choices": [], "usage": usage})
        await self.raw(b"data: [DONE]\n\n")


async def answer(reply):
    """The well-behaved script: one chunk a token, as many as asked for."""
    await reply.head()
    count = reply.request["max_tokens"]
    for place in range(count):
        await reply.token(finish="length" if place == count - 1 else None)
    await reply.end()


class FakeServer:
    def __init__(self):
        self.script = answer
        self.models = ["tiny"]
        self.tokens = None  # what /tokenize answers; None: there is no such path
        self.requests = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.server = self.call(asyncio.start_server(self.serve, "127.0.0.1", 0, backlog=1024))
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    async def serve(self, reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method_path, *fields = head.decode().split("\r\n")
            lengths = [int(field.split(":")[1]) for field in fields if field.lower().startswith("content-length:")]
            body = await reader.readexactly(lengths[0]) if lengths else b"null"
            await self.dispatch(method_path.split()[1], json.loads(body), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away
        finally:
            writer.close()

    async def dispatch(self, path, body, reader, writer):
        reply = Reply(reader, writer, body, len(self.requests))
        if path == "/v1/completions":
            self.requests.append(body)
            await self.script(reply)
        elif path == "/v1/models":
            await self.json(reply, {"object": "list", "data": [{"id": name} for name in self.models]})
        elif path == "/tokenize" and self.tokens is not None:
            await self.json(reply, {"tokens": self.tokens, "count": len(self.tokens)})
        else:
            await reply.head(404)

    async def json(self, reply, value):
        await reply.head()
        await reply.raw(json.dumps(value).encode())

    async def stop(self):
        self.server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def close(self):
        self.call(self.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        self.loop.close()
