"""A whole client with nothing but pyzmq and msgpack: python client_example.py RUN_DIR MODEL PROMPT"""

import secrets
import sys

import msgpack
import zmq

GENERATE, CANCEL, SNAPSHOT, DONE, FAILED = 0x02, 0x03, 0x47, 0x48, 0x49


def generate(run_dir, **request):
    """Yield the answer piece by piece. Whoever stops listening cancels the request."""
    request_id, chars, ended = secrets.token_bytes(16), 0, False
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 200
        socket.connect(f"ipc://{run_dir}/daemon.sock")
        socket.send_multipart([bytes([GENERATE]) + request_id, msgpack.packb(request)])
        try:
            while socket.poll(5000):
                head, body = socket.recv_multipart()
                event = msgpack.unpackb(body)
                if head[1:] != request_id:
                    continue
                if head[0] == SNAPSHOT and event.get("channel", "content") == "content":
                    assert event["offset"] == chars, "a piece is missing"
                    chars += len(event.get("text", ""))
                    yield event.get("text", "")
                elif head[0] in (DONE, FAILED):
                    ended = True
                    if head[0] == FAILED:
                        raise RuntimeError(f"{event['message']} [{event['code']}]")
                    return
            raise RuntimeError("no daemon: it was silent for 5 seconds")
        finally:
            if not ended:
                socket.send_multipart([bytes([CANCEL]) + request_id, msgpack.packb({})])


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python client_example.py RUN_DIR MODEL PROMPT")
    try:
        for piece in generate(sys.argv[1], model=sys.argv[2], messages=[{"role": "user", "content": sys.argv[3]}]):
            print(piece, end="", flush=True)
    except RuntimeError as error:
        sys.exit(f"error: {error}")
