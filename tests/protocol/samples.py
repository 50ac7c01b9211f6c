"""One message of each kind with required fields only, and one with every field away from its default."""

from __future__ import annotations

from mlx_bulkhead.protocol import commands as c
from mlx_bulkhead.protocol import events as e
from mlx_bulkhead.protocol import values as v
from mlx_bulkhead.protocol.codec import Message

REQUEST_ID = bytes(range(16))

_MEMORY = v.Memory(mlx_active=1, mlx_cache=2, mlx_peak=3, footprint=2**33)
_LIMITS = v.Limits(
    context_tokens=8192,
    max_running=8,
    max_queued=64,
    memory_bytes=2**34,
    wired_bytes=2**32,
    cache_bytes=2**30,
    enforced_by="metal",
)
_INFO = v.WorkerInfo(
    engine="text",
    model_type="qwen3",
    backend="metal",
    vocab_size=151936,
    load_seconds=1.5,
    import_seconds=0.5,
    memory_before=v.Memory(footprint=2**27),
    memory_after=_MEMORY,
    limits=_LIMITS,
    template=v.TemplateInfo(
        has_template=True, format="chatml", overridden=True, thinking=True, tools=True, bos=True, eos=True, pad=True
    ),
    versions={"mlx": "0.32.4"},
)
_STATS = v.WorkerStats(
    running=1,
    queued=2,
    steps=300,
    requests_started=4,
    requests_done=5,
    requests_failed=6,
    requests_cancelled=7,
    prompt_tokens=800,
    completion_tokens=900,
    prefill_tokens_per_second=1000.5,
    decode_tokens_per_second=50.25,
    last_token_age_s=0.125,
    oldest_request_age_s=2.5,
    engine="batch",
    phase="decode",
    memory=_MEMORY,
    frames_unknown=1,
    frames_refused=2,
    cache=v.CacheStats(
        entries=1,
        bytes=2**20,
        hits=2,
        misses=3,
        tokens_reused=400,
        evictions=5,
        disk_entries=6,
        disk_bytes=2**21,
        disk_hits=7,
        disk_errors=8,
    ),
)
_STATUS = v.ModelStatus(
    name="tiny",
    state="READY",
    model="/models/tiny",
    pid=4321,
    incarnation=2,
    engine="text",
    in_flight=3,
    restarts=1,
    uptime_s=12.5,
    footprint=2**30,
    last_exit="SIGABRT: aborted",
    next_retry_s=0.5,
    info=_INFO,
    stats=_STATS,
    crashes=1,
    recycles=2,
    requests_total=10,
    requests_resumed=2,
    stats_age_s=0.25,
    problem="two crashes in a row",
    health="suspect",
    log_tail=["first line", "last line"],
)
_USAGE = v.Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=20)
_TIMINGS = v.Timings(
    prompt_n=10,
    prompt_ms=5.0,
    prompt_per_token_ms=0.5,
    prompt_per_second=2000.0,
    predicted_n=20,
    predicted_ms=400.0,
    predicted_per_token_ms=20.0,
    predicted_per_second=50.0,
    cache_n=4,
    queued_ms=1.25,
)
_CHAT = v.ChatMessage(
    role="assistant",
    content=[
        v.Part(type="text", text="a cat, ein Kätzchen, 🐈"),
        v.Part(type="image", data=b"\x89PNG"),
        v.Part(type="image", path="/tmp/cat.png"),
    ],
    name="tom",
    tool_calls=[{"id": "call_1", "function": {"name": "pet", "arguments": {"times": 3}}}],
    tool_call_id="call_0",
    reasoning_content="It purrs.",
)

_FORMAT = v.ResponseFormat(
    type="json_schema", schema={"type": "object"}, pattern="[0-9]+", choices=["yes", "no"], grammar='start: "a"'
)
_LOGPROBS = {"logprobs": [-0.5, -2.25], "top_logprobs": [{995: -0.5, 7: -1.5}, {12: -2.25}]}

MINIMAL: tuple[Message, ...] = (
    c.Load(name="tiny", model="/models/tiny"),
    c.Generate(model="tiny", prompt="Hello"),
    c.Cancel(),
    c.Stats(),
    c.Unload(model="tiny"),
    c.Shutdown(),
    c.Models(),
    c.Attach(request=REQUEST_ID),
    c.Restart(model="tiny"),
    e.Hello(protocol=1, incarnation="a1b2", pid=4321),
    e.LoadProgress(phase="weights"),
    e.Loaded(name="tiny", info=v.WorkerInfo()),
    e.LoadFailed(code="load_failed", message="no config.json"),
    e.Accepted(),
    e.Progress(phase="queued"),
    e.Snapshot(seq=0, offset=0),
    e.Done(finish_reason="stop", usage=v.Usage(), timings=v.Timings(), engine="text"),
    e.Failed(code="bad_request", message="prompt is empty or blank"),
    e.StatsReply(),
    e.Heartbeat(steps=0, stats=v.WorkerStats()),
    e.Exiting(),
    e.Unloaded(name="tiny"),
    e.ModelsReply(),
)

FULL: tuple[Message, ...] = (
    c.Load(
        name="tiny",
        model="/models/tiny",
        context_limit=8192,
        memory_limit=2**34,
        trust_remote_code=True,
        chat_template="{{ messages }}",
        max_running=8,
        max_queued=64,
        env={"MLX_METAL_JIT": "1"},
        stall_budget_s=30.0,
        recycle_requests=1000,
        recycle_age_s=86400.0,
        recycle_footprint=8589934592,
        deterministic=True,
        cache_entries=8,
        cache_bytes=2**30,
        cache_disk_bytes=2**34,
        cache_dir="/var/cache/prompts",
    ),
    c.Generate(
        model="tiny",
        prompt="Hello",
        tokens=[1, 127, 128, 65536],
        messages=[v.ChatMessage(role="user", content="Hi"), _CHAT],
        tools=[{"type": "function", "function": {"name": "pet"}}],
        template_args={"enable_thinking": False},
        max_tokens=100,
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        min_p=0.0625,
        xtc_probability=0.5,
        xtc_threshold=0.25,
        seed=2**63 - 1,
        stop=["\n\n", "END"],
        logit_bias={0: -100.0, 151935: 2.5},
        repetition_penalty=1.5,
        repetition_window=32,
        presence_penalty=0.25,
        frequency_penalty=-0.25,
        logprobs=True,
        top_logprobs=3,
        response_format=_FORMAT,
        stream_interval=4,
        deadline_s=30.0,
        on_crash="fail",
        detached=True,
        resume_tokens=[5, 6],
        resume_chars=7,
        resume_seq=8,
        tenant="alice",
        cache=False,
        channels=False,
        resume_reasoning_chars=9,
        resume_tool_chars=10,
        continue_final=True,
    ),
    c.Cancel(reason="deadline"),
    c.Stats(model="tiny"),
    c.Unload(model="tiny"),
    c.Shutdown(grace_s=1.5, drain=True),
    c.Models(),
    c.Attach(request=REQUEST_ID),
    c.Restart(model="tiny"),
    e.Hello(protocol=1, incarnation="a1b2", pid=4321, rank=1, size=2),
    e.LoadProgress(phase="weights", done=100, total=2**33),
    e.Loaded(name="tiny", info=_INFO),
    e.LoadFailed(code="out_of_memory", message="needs 9 GB, 8 GB are free", retryable=True),
    e.Accepted(position=3),
    e.Progress(phase="prefill", processed=512, total=2048),
    e.Snapshot(seq=1, offset=5, text=" wörld 🌍", tokens=[995, 12], channel="reasoning", **_LOGPROBS),
    e.Done(
        finish_reason="length",
        usage=_USAGE,
        timings=_TIMINGS,
        engine="batch",
        fallback_reason="image part",
        chars=14,
        restarts=1,
        tool_calls=[v.ToolCall(id="call_0", name="get_weather", arguments='{"city": "Brno"}')],
        tool_error="call 2 could not be parsed",
    ),
    e.Failed(code="worker_crashed", message="SIGABRT", retryable=True, usage=_USAGE, timings=_TIMINGS),
    e.StatsReply(models=[_STATUS], worker=_STATS, daemon={"uptime_s": 3.5}),
    e.Heartbeat(steps=300, stats=_STATS, busy_since_s=0.5),
    e.Exiting(reason="asked to", exit_code=47),
    e.Unloaded(name="tiny", was_loaded=False),
    e.ModelsReply(models=[_STATUS]),
)

NAMED: dict[str, Message] = {
    f"{type(message).__name__}.{which}": message
    for which, messages in (("minimal", MINIMAL), ("full", FULL))
    for message in messages
}
