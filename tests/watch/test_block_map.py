"""The block map page: what it lets out, to whom, and what a person sees of it in a browser."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from scheduler_svc.api.server import ApiServer, BindFailed
from scheduler_svc.settings import SchedulerSettings, parse_settings
from tests.api.scripted_engine import ScriptedEngine
from tests.security.keys import Keys, run_keys
from tests.watch.browser import Page, browsing, find_browser
from tests.watch.conftest import Watched, answering

PROMPT = list(range(300, 340))
READ = ("--role", "read", "--role", "generate")


@pytest.fixture
def flags() -> dict[str, object]:
    return {"block_map_address": "127.0.0.1:0"}


@asynccontextmanager
async def served(**settings: object) -> AsyncIterator[str]:
    """The page of a scheduler without an executor; gives its address."""
    given = SchedulerSettings(listen_address="127.0.0.1:0", **settings)
    server = ApiServer(ScriptedEngine(), given)
    await server.start()
    yield server.block_map_address
    await server.stop(0.1)


async def get(address: str, path: str = "", scheme: str = "http", **options: object) -> tuple[int, str]:
    async with aiohttp.ClientSession() as http, http.get(f"{scheme}://{address}/{path}", **options) as answer:
        return answer.status, await answer.text()


async def test_without_the_setting_no_page_is_served() -> None:
    server = ApiServer(ScriptedEngine(), SchedulerSettings(listen_address="127.0.0.1:0"))
    await server.start()
    assert server.block_map_address is None
    await server.stop(0.1)


async def test_an_address_that_is_taken_is_named() -> None:
    async with served(block_map_address="127.0.0.1:0") as address:
        with pytest.raises(BindFailed, match=f"--block-map-address {address}"):
            async with served(block_map_address=address):
                pass


async def test_the_page_asks_nothing_of_anybody_else_and_runs_its_own_script_alone() -> None:
    async with (
        served(block_map_address="127.0.0.1:0") as address,
        aiohttp.ClientSession() as http,
        http.get(f"http://{address}/") as answer,
    ):
        page = await answer.text()
        policy = answer.headers["Content-Security-Policy"]
    assert answer.status == 200
    assert "<canvas" in page
    assert not any(there in page for there in ("http://", "https://", "src=", "@import", "url("))
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("path", ["", "watch", "requests/x", "prefixes"])
async def test_where_nobody_needs_a_token_other_names_for_this_machine_are_refused(path: str) -> None:
    async with served(block_map_address="127.0.0.1:0") as address:
        status, said = await get(address, path, headers={"Host": "evil.test"})
        assert status == 403
        assert "evil.test" in json.loads(said)["error"]


async def test_the_stream_and_what_is_asked_for_beside_it_are_the_control_services(watched: Watched) -> None:
    address = watched.server.block_map_address
    async with (
        answering(watched.client, "two", PROMPT, max_tokens=400, n=2),
        aiohttp.ClientSession() as http,
        http.get(f"http://{address}/watch?period_ms=100") as answer,
    ):
        first = json.loads((await answer.content.readuntil(b"\n\n")).removeprefix(b"data: "))
        second = json.loads((await answer.content.readuntil(b"\n\n")).removeprefix(b"data: "))
        _, tables = await get(address, "requests/two")
        _, tree = await get(address, "prefixes?max_blocks=1")
    assert answer.headers["Content-Type"] == "text/event-stream"
    assert first["requests"][0]["request_id"] == "two"
    assert first["executors"][0]["shared_blocks"] == 2
    assert second["rates"]["generated_tokens_per_s"] >= 0
    assert [table["counts"][0] for table in json.loads(tables)["tables"]] == [2, 2]
    assert len(json.loads(tree)["blocks"]) == 1
    for path, status, named in (
        ("requests/none", 404, "no live request is called 'none'"),
        ("watch?period_ms=5", 400, "period_ms: is 5"),
        ("watch?period_ms=x", 400, "period_ms: is 'x'"),
        ("prefixes?max_blocks=0", 400, "max_blocks: is 0"),
        ("prefixes?executor=y", 404, "no executor 'y'"),
    ):
        found, said = await get(address, path)
        assert found == status
        assert named in json.loads(said)["error"]
    assert (await get(address, "nothing"))[0] == 404


async def test_a_reader_that_goes_away_leaves_nothing(watched: Watched) -> None:
    url = f"http://{watched.server.block_map_address}/watch"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        await answer.content.readuntil(b"\n\n")
        assert watched.engine.watch.is_watched
    async with asyncio.timeout(10):
        while watched.engine.watch.is_watched:
            await asyncio.sleep(0.01)


async def test_what_the_page_shows_is_for_those_whom_the_methods_are_for(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    token = run_keys("token", str(file), "reader", *READ).strip()
    other = run_keys("token", str(file), "other", "--role", "generate").strip()
    async with served(block_map_address="127.0.0.1:0", token_file=file) as address:
        assert (await get(address))[0] == 200
        for path in ("watch", "requests/x", "prefixes"):
            for given, status in ((None, 401), ("Bearer nonsense", 401), (f"Bearer {other}", 403), (token, 401)):
                headers = {} if given is None else {"Authorization": given}
                assert (await get(address, path, headers=headers))[0] == status
        status, said = await get(address, "requests/x", headers={"Authorization": f"Bearer {token}"})
        assert (status, json.loads(said)) == (404, {"error": "request_id: no live request is called 'x'"})
        assert (await get(address, "requests/x", headers={"Host": "paged.test", "Authorization": f"Bearer {token}"}))[
            0
        ] == 404


async def test_a_token_that_is_no_text_is_not_known(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    run_keys("token", str(file), "reader", *READ)
    async with served(block_map_address="127.0.0.1:0", token_file=file) as address:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET /watch HTTP/1.1\r\nHost: paged.test\r\nAuthorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n"
        )
        status = await reader.readline()
        writer.close()
    assert status.split()[1] == b"401"


def tls(keys: Keys, *, shows: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=keys.tls / "ca.pem")
    if shows:
        context.load_cert_chain(keys.tls / "client.pem", keys.tls / "client-key.pem")
    return context


async def test_over_tls_it_asks_for_certificates_as_grpc_does_and_follows_their_files(tmp_path: Path) -> None:
    keys = Keys.make(tmp_path / "keys")
    given = parse_settings([*keys.scheduler_flags, "--block-map-address", "127.0.0.1:0", "--listen-address", "[::1]:0"])
    server = ApiServer(ScriptedEngine(), given)
    await server.start()
    address = server.block_map_address
    assert (await get(address, scheme="https", ssl=tls(keys, shows=True)))[0] == 200
    with pytest.raises(aiohttp.ClientError):
        await get(address, scheme="https", ssl=tls(keys, shows=False))
    with pytest.raises(aiohttp.ClientError):
        await get(address)
    others = Keys.make(tmp_path / "others")
    for name in ("server.pem", "server-key.pem", "ca.pem"):
        (keys.tls / name).write_bytes((others.tls / name).read_bytes())
    async with asyncio.timeout(20):
        while True:
            try:
                assert (await get(address, scheme="https", ssl=tls(others, shows=True)))[0] == 200
                break
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)
    with pytest.raises(aiohttp.ClientError):
        await get(address, scheme="https", ssl=tls(keys, shows=True))
    await server.stop(0.1)


def test_beyond_this_machine_it_needs_the_same_guards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(["--block-map-address", "0.0.0.0:8080"])
    said = capsys.readouterr().err
    for named in ("--block-map-address 0.0.0.0:8080", "--tls-certificate", "--token-file", "--insecure"):
        assert named in said
    keys = Keys.make(tmp_path / "keys")
    parse_settings(["--block-map-address", "0.0.0.0:8080", *keys.scheduler_flags])
    parse_settings(["--block-map-address", "0.0.0.0:8080", "--insecure"])


@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed, so nobody looks at the page")
class TestInABrowser:
    async def test_a_person_sees_blocks_requests_a_table_and_the_prefix_tree(
        self, watched: Watched, tmp_path: Path
    ) -> None:
        async with (
            answering(watched.client, "<b>two</b>", PROMPT, max_tokens=2000, n=3),
            answering(watched.client, "other", PROMPT[:32] + [7] * 20, max_tokens=2000),
            browsing(tmp_path / "browser") as page,
        ):
            await page.open(f"http://{watched.server.block_map_address}/")
            await page.until("document.body.dataset.state === 'live'")
            assert await page.until("document.querySelectorAll('#requests tr').length") == 2
            assert (await page.value("document.querySelector('#requests td').textContent")) == "<b>two</b>"
            assert int(await page.value("at('count-few').textContent")) == 2  # held by four tables
            assert int(await page.value("at('count-copied').textContent")) >= 2
            assert int(await page.value("at('count-used').textContent")) >= 4

            await page.value("document.querySelector('#requests tr').click()")
            assert await page.until("document.querySelectorAll('#tables .cells').length") == 3
            assert await page.until("at('tree').children.length")
            shared = next(block for block, count in watched.counts().items() if count == 4)
            await self.hover(page, shared)
            facts = await page.until("!at('tip').hidden && at('tip').textContent")
            assert facts.startswith(f"block {shared}: shared by 4 tables\n<b>two</b>, sequence 0: tokens 0 to 15")
            assert "prefix " in await page.until(f"/prefix/.test(factsOf({shared})) && factsOf({shared})")
            assert await self.colour_of(page, shared) == await page.value(
                "getComputedStyle(legendOf('few')).backgroundColor"
            )
            before = await page.value("shown.load.generated_tokens")
            await page.until(f"Number(shown.load.generated_tokens) > {before} + 40")
            assert page.problems == []

    async def test_a_token_is_asked_for_and_a_wrong_one_again(self, tmp_path: Path) -> None:
        file = tmp_path / "tokens.toml"
        token = run_keys("token", str(file), "reader", *READ).strip()
        async with (
            served(block_map_address="127.0.0.1:0", token_file=file) as address,
            browsing(tmp_path / "browser") as page,
        ):
            await page.open(f"http://{address}/")
            for given in ("wrong", token):
                await page.until("at('ask').open")
                await page.value(f"at('token').value = '{given}'; at('ask').querySelector('button').click()")
            await page.until("document.body.dataset.state === 'live'")
            assert len(page.problems) == 2  # the two refusals

    async def hover(self, page: Page, block: int) -> None:
        box = "at('map').getBoundingClientRect()"
        x, y = await page.value(f"[{box}.left + place({block})[0] + 2, {box}.top + place({block})[1] + 2]")
        await page.move_to(x, y)

    async def colour_of(self, page: Page, block: int) -> str:
        x, y = await page.value(f"place({block}).map(edge => (edge + layout.cell / 3) * devicePixelRatio)")
        red, green, blue, _ = await page.value(f"[...at('map').getContext('2d').getImageData({x}, {y}, 1, 1).data]")
        return f"rgb({red}, {green}, {blue})"
