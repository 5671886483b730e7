"""Opens reports in headless Chromium: every report renders without messages in the console, the switches work, the keyboard
reaches the controls, the page follows the dark mode, and a frame in another page shows the report."""

import html
import json
import os
import struct
import subprocess
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1200,1000"
)


def dtshard(*arguments, code=0):
    run = subprocess.run([os.environ["DTSHARD"], *map(str, arguments)], capture_output=True, text=True)
    assert run.returncode == code, run.stderr


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    header = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    """The reports by name."""
    folder = tmp_path_factory.mktemp("reports")
    floats = lambda *values: struct.pack(f"<{len(values)}f", *values)
    names = [f"model.layers.{layer}.{part}" for layer in range(4) for part in ("wq", "<script>alert(1)</script>")]
    left = {name: ("F32", [2, 2], floats(1, 2, 3, 4)) for name in names}
    right = dict(left)
    right[names[2]] = ("F32", [2, 2], floats(1, 2, 3, 4.5))
    right[names[5]] = ("F32", [2, 2], floats(1, 2, float("nan"), 4))
    write_safetensors(folder / "left.safetensors", left)
    write_safetensors(folder / "right.safetensors", right)
    damaged = folder / "damaged"
    damaged.mkdir()
    for rank in (0, 1, 3):
        name = f"model_world_size_4_rank_{rank}.pt"
        (damaged / name).write_bytes((FIXTURES / "llama_tiny/ranks" / name).read_bytes())
    page = lambda name: folder / f"{name}.html"
    dtshard("inspect", FIXTURES / "fsdp_tp/ranks", "--html", page("inspect"))
    dtshard("inspect", FIXTURES / "fsdp4/dcp", "--html", page("dcp"))
    dtshard("inspect", damaged, "--html", page("damaged"))
    dtshard("verify", FIXTURES / "conflict/replica", "--html", page("verify"), code=1)
    dtshard("verify", folder / "left.safetensors", folder / "right.safetensors", "--html", page("diff"), code=1)
    dtshard("reshard", FIXTURES / "fsdp4/ranks", "--mesh", "dp=3", "--dry-run", "--html", page("plan"))
    frame = html.escape(page("inspect").read_text())
    page("frame").write_text(f"<!DOCTYPE html><title>notebook</title><iframe sandbox srcdoc=\"{frame}\"></iframe>")
    return {path.stem: path for path in folder.glob("*.html")}


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, reports):
    """A function that opens a report."""

    def open_report(name):
        browser.get(reports[name].as_uri())
        return browser

    yield open_report
    assert browser.get_log("browser") == [], "messages in the console"


NAMES = ["inspect", "dcp", "damaged", "verify", "diff", "plan", "frame"]


@pytest.mark.parametrize("name", NAMES)
def test_report_renders_without_messages(opened, name):
    page = opened(name)
    if name == "frame":
        page.switch_to.frame(page.find_element(By.TAG_NAME, "iframe"))
    assert page.find_element(By.TAG_NAME, "h1").is_displayed()
    assert page.find_element(By.ID, "summary").is_displayed()
    page.switch_to.default_content()


@pytest.mark.parametrize("name", NAMES[:-1])
def test_page_is_not_wider_than_the_window(opened, name):
    page = opened(name)
    widths = page.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert widths[0] <= widths[1]


def test_each_switch_changes_the_colours(opened):
    page = opened("inspect")
    fills, keys = [], []
    for switch in page.find_elements(By.CSS_SELECTOR, "input[name=colour]"):
        switch.click()
        boxes = page.find_elements(By.CSS_SELECTOR, ".treemap .scroll rect")
        fills.append([box.value_of_css_property("fill") for box in boxes])
        keys.append([key.text for key in page.find_elements(By.CSS_SELECTOR, ".key") if key.is_displayed()])
    assert len(fills) == 3
    assert len({str(fill) for fill in fills}) == 3, "each switch has colours of its own"
    assert all(len(shown) == 1 and shown[0] for shown in keys), "one key is shown at a time"


def test_switches_follow_the_keyboard(opened):
    page = opened("inspect")
    switches = page.find_elements(By.CSS_SELECTOR, "input[name=colour]")
    switches[0].click()
    switches[0].send_keys(Keys.ARROW_RIGHT)
    assert switches[1].is_selected()


def test_keyboard_focus_reaches_every_control(opened):
    page = opened("inspect")
    controls = page.execute_script("return document.querySelectorAll('a, summary, .scroll').length") + 1
    body = page.find_element(By.TAG_NAME, "body")
    reached = set()
    for _ in range(controls + 2):
        page.switch_to.active_element.send_keys(Keys.TAB) if reached else body.send_keys(Keys.TAB)
        reached.add(page.switch_to.active_element.id)
    assert len(reached) >= controls


def test_every_picture_and_control_has_a_name(opened):
    for name in NAMES[:-1]:
        page = opened(name)
        nameless = page.execute_script(
            "return [...document.querySelectorAll('svg[role=img]')].filter(it => !it.querySelector(':scope > title')?.textContent)"
            ".concat([...document.querySelectorAll('input')].filter(it => !it.labels.length))"
            ".concat([...document.querySelectorAll('[role=region]')].filter(it => !it.ariaLabel))"
            ".concat([...document.querySelectorAll('table')].filter(it => !it.querySelector('th[scope=col]'))).length"
        )
        assert nameless == 0, name
        ids = page.execute_script("return [...document.querySelectorAll('[id]')].map(it => it.id)")
        assert len(ids) == len(set(ids)), name


def test_dark_mode_has_a_dark_ground(opened):
    page = opened("inspect")
    grounds = {}
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        colour = page.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
        grounds[scheme] = sum(int(part) for part in colour.strip("rgba()").split(",")[:3])
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert grounds["light"] > 600 and grounds["dark"] < 150, grounds


def test_problems_come_first_and_are_marked(opened):
    page = opened("damaged")
    problems = page.find_element(By.CSS_SELECTOR, ".problems")
    assert "rank_2" in problems.text
    assert problems.location["y"] < page.find_element(By.ID, "summary").location["y"]
    assert page.find_elements(By.CSS_SELECTOR, ".grid path.hole"), "holes are drawn"
    page = opened("verify")
    assert "replica" in page.find_element(By.CSS_SELECTOR, ".problems").text
    assert page.find_elements(By.CSS_SELECTOR, ".grid path.cross"), "the first different element is drawn"


def test_differences_are_shown_by_layer(opened):
    page = opened("diff")
    text = page.find_element(By.CSS_SELECTOR, "table.heat").text
    assert "model.layers.1" in text and "nan" in text and "=" in text, text
    assert not page.find_elements(By.CSS_SELECTOR, "main script"), "names are text"


def test_plan_has_the_bytes_from_rank_to_rank(opened):
    page = opened("plan")
    table = page.find_element(By.CSS_SELECTOR, "table.heat")
    assert len(table.find_elements(By.CSS_SELECTOR, "tbody tr")) == 4
    assert len(table.find_elements(By.CSS_SELECTOR, "thead th")) == 1 + 3
