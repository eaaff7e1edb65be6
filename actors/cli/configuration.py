"""``sightline config``: check a configuration, print its schema."""

import sys

import typer

from actors.cli.options import Config, Json
from actors.cli.output import plural, print_json

app = typer.Typer(no_args_is_help=True, help="Check configuration files; print their schema.")


@app.command("check")
def check(
    config: Config,
    json: Json = None,
) -> None:
    """Validate a configuration; list every problem with line, key and remedy.

    Starts nothing and loads no model. Exits with code 2 if there is a problem.

    $ sightline config check -c configs/minimal.yaml
    """
    from cluster.config import InvalidConfigError, camera_settings, load_config

    try:
        loaded = load_config(config)
    except InvalidConfigError as error:
        problems = [{"key": p.key, "line": p.line, "message": p.message} for p in error.problems]
        print_json(json, {"file": str(config), "ok": False, "problems": problems})
        for sentence in error.sentences():
            print(f"error: {sentence}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    if not print_json(json, {"file": str(config), "ok": True, "problems": []}):
        return
    cameras = [camera_settings(loaded, camera.name) for camera in loaded.cameras]
    questions = sum(len(each.questions) for each in cameras) if cameras else len(loaded.questions)
    print(f"{config}: ok, {plural(len(cameras), 'camera')}, {plural(questions, 'question')} in all")


@app.command("schema")
def print_schema() -> None:
    """Print the JSON schema of the configuration, for editors and as a reference.

    $ sightline config schema > schema.json
    """
    from cluster.config.load import schema_text

    sys.stdout.write(schema_text())


@app.command("crd")
def print_crd() -> None:
    """Print the CustomResourceDefinition of Camera, for `kubectl apply -f -`.

    $ sightline config crd > cameras.yaml
    """
    from cluster.kubernetes.crd import definition_text

    sys.stdout.write(definition_text())
