"""Versions, and what pairs with what.

Three projects release at their own pace here: torch is built against one Triton and says so in its
metadata, FLA is written against Triton's internals and states a range that is wider than what works,
and transformers binds FLA where it can be imported and says nothing where it can't. pip sees to none
of this once somebody has installed one of them by hand. So the metadata of what is installed are read,
each requirement is compared with what is there, and pairs that are known to fail in spite of their
metadata stand in a table.
"""

import importlib.metadata
import platform
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import attrs
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from engine.doctor_findings import Finding

PROJECT = "dflash-engine"
UNKNOWN = "unknown"
PACKAGES = ("torch", "triton", "transformers", "flash-linear-attention", "fla-core", "causal-conv1d")


@attrs.frozen(kw_only=True)
class Installed:
    """What metadata say about this interpreter and its packages."""

    python: str
    versions: Mapping[str, str | None]
    """By distribution; None where it is not installed."""
    requirements: Mapping[str, tuple[str, ...]]
    """By distribution that is installed: its `Requires-Dist` lines, and the project's own."""
    python_range: str | None = None
    """The project's `Requires-Python`; None where neither metadata nor a source tree gives it."""

    def version(self, name: str) -> str | None:
        return self.versions.get(name)


@attrs.frozen
class KnownFailure:
    """A pair that its metadata allow and that does not work."""

    first: str
    second: str
    what: str
    cure: str


KNOWN_FAILURES = (
    KnownFailure(
        "fla-core<0.6",
        "triton>=3.9",
        "this FLA does not import on this Triton",
        'pip install -U "flash-linear-attention>=0.6"',
    ),
)


def read_installed() -> Installed:
    """Read versions and requirements; imports none of the packages."""
    python_range, own = _project()
    versions: dict[str, str | None] = {}
    requirements: dict[str, tuple[str, ...]] = {PROJECT: own}
    for name in (*PACKAGES, *(Requirement(line).name for line in own)):
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
            continue
        versions[name] = distribution.version
        if name in PACKAGES:
            requirements[name] = tuple(distribution.requires or ())
    return Installed(
        python=platform.python_version(),
        versions=versions,
        requirements=requirements,
        python_range=python_range,
    )


def _project() -> tuple[str | None, tuple[str, ...]]:
    """The project's range of Python and its requirements: from its metadata, or its source tree."""
    try:
        metadata = importlib.metadata.metadata(PROJECT)
        return metadata["Requires-Python"], tuple(metadata.get_all("Requires-Dist") or ())
    except importlib.metadata.PackageNotFoundError:
        pass
    path = Path(__file__).parents[1] / "pyproject.toml"
    if not path.is_file():
        return None, ()
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return project["requires-python"], tuple(project["dependencies"])


def python_findings(installed: Installed, *, free_threaded: bool, gil: bool) -> Iterator[Finding]:
    """The interpreter: its version, and whether threads of it run Python at the same time.

    Args:
        free_threaded: whether this build can do without the global lock. gil: whether it has it now.
    """
    wanted = installed.python_range
    if wanted and not SpecifierSet(wanted).contains(installed.python, prereleases=True):
        yield Finding(
            "python",
            "fail",
            f"{installed.python}, {wanted} is needed",
            "make the environment with such a one",
        )
    else:
        yield Finding("python", "ok", installed.python + (f" ({wanted} is needed)" if wanted else ""))
    if not free_threaded:
        yield Finding("gil", "ok", "the usual build, with a global interpreter lock")
        return
    yield Finding(
        "gil",
        "warn",
        f"free-threaded build, its global lock is {'on' if gil else 'off'}; nothing here was measured on one",
        "use the usual build, or run `python -m engine stress` before anything long",
    )


def gil_facts() -> dict[str, bool]:
    """The arguments of `python_findings` for this interpreter."""
    enabled = getattr(sys, "_is_gil_enabled", None)
    return {
        "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        "gil": True if enabled is None else bool(enabled()),
    }


def version_findings(installed: Installed, cuda: str | None = UNKNOWN) -> Iterator[Finding]:
    """What is installed, one line a package. What a package's absence costs is said where it is missed.

    Args:
        cuda: what torch was built for; None for a build without it.
    """
    for name in PACKAGES:
        version = installed.version(name) or "not installed"
        if name == "torch" and cuda != UNKNOWN:
            version += f", built for CUDA {cuda}" if cuda else ", built without CUDA"
        yield Finding(name, "ok", version)


def pair_findings(installed: Installed, *, gpus: bool) -> Iterator[Finding]:
    """What pairs with what.

    Args:
        gpus: whether there is a GPU. Without one no kernel is launched, and a missing Triton or a
            Triton that torch was not built against costs nothing.
    """
    yield from _project_findings(installed)
    yield from _torch_triton(installed, gpus)
    yield from _fla(installed, gpus)


def problems(lines: Iterable[str], installed: Installed, *, extra: str = "") -> list[str]:
    """Requirements that what is installed does not meet, such as `triton 3.5.0 (>=3.6 is needed)`.

    Args:
        extra: the extra whose requirements count as well. Packages whose version was not read are
            passed over.
    """
    found = []
    for requirement in _applicable(lines, extra):
        if requirement.name not in installed.versions:
            continue
        version, wanted = installed.versions[requirement.name], str(requirement.specifier)
        if version is None:
            found.append(f"{requirement.name} is not installed ({wanted or 'any'} is needed)")
        elif not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version} ({wanted} is needed)")
    return found


def _applicable(lines: Iterable[str], extra: str) -> list[Requirement]:
    requirements = [Requirement(line) for line in lines]
    return [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": extra})]


def _project_findings(installed: Installed) -> Iterator[Finding]:
    own = installed.requirements.get(PROJECT, ())
    if not own:
        yield Finding(
            "requirements",
            "warn",
            "the project's own ranges are unknown: neither its metadata nor its pyproject.toml is there",
            "install it with pip, or run it from its source tree",
        )
    elif missed := problems(own, installed):
        wanted = [f'"{each.name}{each.specifier}"' for each in _applicable(own, "")]
        wrong = {line.split()[0] for line in missed}
        install = " ".join(word for word in wanted if Requirement(word.strip('"')).name in wrong)
        yield Finding("requirements", "fail", "; ".join(missed), f"pip install -U {install}")
    else:
        yield Finding("requirements", "ok", f"all {len(_applicable(own, ''))} are in the project's ranges")


def _torch_triton(installed: Installed, gpus: bool) -> Iterator[Finding]:
    subject = "triton for torch"
    torch, triton = installed.version("torch"), installed.version("triton")
    pins = [
        each
        for each in _applicable(installed.requirements.get("torch", ()), "")
        if each.name in ("triton", "pytorch-triton")
    ]
    if torch is None:
        return
    if triton is None:
        if gpus:
            yield Finding(subject, "fail", "no Triton, and there are GPUs", "pip install triton")
        else:
            yield Finding(subject, "ok", "no Triton; without a GPU none is needed")
    elif not pins:
        yield Finding(subject, "ok", f"torch {torch} pins none, as builds without CUDA do; {triton} is here")
    elif all(pin.specifier.contains(triton, prereleases=True) for pin in pins):
        yield Finding(subject, "ok", f"{triton}, which torch {torch} was built against")
    else:
        wanted = ", ".join(f"{pin.name}{pin.specifier}" for pin in pins)
        yield Finding(
            subject,
            "warn",
            f"torch {torch} was built against {wanted} and {triton} is here; torch.compile may fail",
            f'pip install "{wanted}", or leave lazy_compile out',
        )


def _fla(installed: Installed, gpus: bool) -> Iterator[Finding]:
    subject = "fla's needs"
    if not installed.version("fla-core"):
        if gpus:
            yield Finding(
                subject,
                "warn",
                "not installed: targets with Gated DeltaNet take PyTorch's functions, many times slower",
                'pip install "flash-linear-attention[cuda]>=0.6"',
            )
        else:
            yield Finding(subject, "ok", "not installed; without a GPU it is not used")
        return
    missed = [
        f"{name} {installed.version(name)}: {problem}"
        for name in ("flash-linear-attention", "fla-core")
        # Only the extra asks for Triton, so that FLA installed without it brings none.
        for problem in problems(installed.requirements.get(name, ()), installed, extra="cuda")
    ]
    if missed:
        # Without a GPU and without Triton there is nothing that FLA could be used for.
        yield Finding(
            subject,
            "fail" if gpus or installed.version("triton") else "warn",
            "; ".join(missed),
            'pip install -U "flash-linear-attention[cuda]>=0.6"',
        )
    else:
        yield Finding(
            subject, "ok", f"fla-core {installed.version('fla-core')} has the torch and Triton it asks for"
        )
    yield from known_failures(installed)


def known_failures(installed: Installed) -> Iterator[Finding]:
    """Installed pairs that are known not to work."""
    for known in KNOWN_FAILURES:
        first, second = Requirement(known.first), Requirement(known.second)
        versions = installed.version(first.name), installed.version(second.name)
        if None in versions:
            continue
        one, other = (str(version) for version in versions)
        if first.specifier.contains(one, prereleases=True) and second.specifier.contains(
            other, prereleases=True
        ):
            found = f"{first.name} {one} with {second.name} {other}: {known.what}"
            yield Finding("known failure", "fail", found, known.cure)
