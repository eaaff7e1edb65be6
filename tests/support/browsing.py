"""What tests do with a page of the console."""

from dataclasses import replace

from axe_playwright_python.sync_playwright import Axe

from cluster.types import LastAnswer

PATIENCE_MS = 20_000


def check_axe(page, *rules):
    """axe finds nothing by its ``rules``; by all of them where none is named."""
    options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    if not page.evaluate("'axe' in window"):
        page.evaluate(Axe().axe_script)
    found = page.evaluate("async (options) => (await axe.run(options)).violations", options)
    assert not found, [page.url, *((each["id"], [node["target"] for node in each["nodes"]][:4]) for each in found)]


class Wall:
    """The wall in ``page``, served by ``gateway``."""

    def __init__(self, page, gateway):
        self.page, self.gateway = page, gateway

    def tile(self, name):
        return self.page.locator(f'[data-camera="{name}"]')

    def shown(self):
        """Names of the tiles in the document, in order."""
        return self.page.eval_on_selector_all(".tile", "tiles => tiles.map(tile => tile.dataset.camera)")

    def search(self, text):
        self.page.fill("input[type=search]", text)

    def counts(self):
        """Filter's word -> how many."""
        chips = self.page.eval_on_selector_all(
            ".chip",
            "chips => chips.map(each => [each.firstChild.textContent.trim(), each.lastElementChild.textContent])",
        )
        return {word: int(number.replace(",", "")) for word, number in chips}


def change(gateway, name, **fields):
    """Change a camera, and have the gateway look at once."""
    gateway.city.change(name, **fields)
    gateway.publish([])


def yes_of(gateway, name, question="person-in-restricted-area"):
    """A camera's next answer, which is yes; nobody is told of it."""
    gateway.city.second += 8
    status = gateway.city.cameras[name]
    made = gateway.city.answers(name)[0]
    said = replace(made, question=question, score=0.93, positive=True, text="Somebody stands there.", gated=False)
    last = (LastAnswer(question, 0.93, True, said.end),)
    gateway.city.put(replace(status, windows_done=status.windows_done + 1, last_answers=last))
    return said


def say_yes(gateway, name, question="person-in-restricted-area", windows=2):
    """A camera answers yes, so often that there is an incident; returns the answers."""
    answers = []
    for _ in range(windows):
        answers.append(yes_of(gateway, name, question))
        gateway.publish(answers[-1:])
    return answers


def say_no(gateway, name, windows=4):
    """A camera answers no; four windows end its incident."""
    for _ in range(windows):
        gateway.city.second += 8
        gateway.publish(gateway.city.answers(name))
        gateway.city.change(name, windows_done=gateway.city.cameras[name].windows_done + 1)


def running(gateway, number=0):
    """A camera that runs, with nothing about it that would bring it to the front."""
    calm = [
        status.name
        for status in gateway.city.cameras.values()
        if status.state == "running" and status.rung == "full" and status.name not in gateway.city.hot
    ]
    return calm[number]
