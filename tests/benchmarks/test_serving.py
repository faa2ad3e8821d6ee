"""What a scheduler's messages are compared with is served and counted."""

from benchmarks.serving.bare import bare


async def test_a_server_with_nothing_behind_it_sends_to_all_its_streams() -> None:
    seen = await bare(num_streams=8, period_ms=5.0, tokens=3, seconds=0.5)  # ready once each stream has had a message
    assert seen.messages_s > 0
    assert seen.message_us > 0
