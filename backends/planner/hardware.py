"""Machines as numbers: memory, arithmetic, bandwidths, from names that people use for them.

Peaks, memory and bandwidths are the vendors' data sheets (dense bfloat16 with float32 sums). What
training reaches of a peak, and what NCCL reaches of a link, are public measurements: A100 150
TFLOP/s in Hugging Face stacks (up to 200 with fused kernels) and NVLink 235 GB/s; H100 300-450
(torchtitan's benchmarks); RTX 3090 and 4090, and PCIe between cards without peer-to-peer access,
AnswerDotAI/fsdp_qlora, ``benchmarks_03_2024.md``; CPU Adam and copies to the host,
deepspeedai/DeepSpeed#3901.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal

GB = 1e9
GIB = 2**30
TERA = 1e12


@dataclass(frozen=True)
class GPU:
    """One accelerator, or one CPU rank."""

    name: str
    memory_bytes: int
    """What the driver gives to programs, which is less than the number on the box."""

    peak_flops: float
    """Dense bfloat16 products a second, by the data sheet."""

    flops: float
    """What training reaches of it in a Hugging Face stack."""

    bandwidth: float
    """Bytes a second between chip and its memory."""

    kind: Literal["server", "workstation", "consumer", "cpu"] = "server"
    """``consumer`` cards have no peer-to-peer access: what one sends another passes the host."""

    nvlink: float = 0.0
    """Bytes a second that NCCL reaches over NVLink; 0 without."""

    pcie: Literal[3, 4, 5] = 4
    """Generation of its PCIe."""

    network: str = "ethernet-25"
    """What usually joins machines of such cards."""

    host_memory: float = 64 * GB
    """Host memory that usually comes with each card, in bytes."""

    @property
    def peer_to_peer(self) -> bool:
        return self.kind in ("server", "workstation")


@dataclass(frozen=True)
class Link:
    """What data moves over between ranks."""

    name: str
    bytes_per_second: float
    """Reached by NCCL's rings: of each GPU inside a machine, of the whole machine between them."""

    overlap: float
    """Share of a gather's time that can pass under computation. 1 on NVLink. Copies through the
    host by the GPU's own threads hide about half at PCIe 4, and nothing on slow lanes."""

    latency: float = 30e-6
    """Seconds before a collective moves its first byte."""

    @property
    def reduce_overlap(self) -> float:
        """Gradients wait for nobody, so that their sums hide better than gathers do."""
        return 1 - (1 - self.overlap) ** 2


@dataclass(frozen=True)
class Machine:
    """All ranks of a job: ``nodes`` equal machines of ``ranks_per_node`` GPUs."""

    gpu: GPU
    ranks_per_node: int
    nodes: int
    link: Link
    """Between the GPUs of one node."""

    network: Link
    """Between nodes; its bandwidth is a node's."""

    host_memory_bytes: int
    """Of one node."""

    host_link: float
    """Bytes a second between one GPU and the host, while the others copy as well."""

    cpu_memory_bandwidth: float
    """Bytes a second of one node's main memory."""

    nvme_bandwidth: float
    """Bytes a second of one node's disks."""

    threads_per_rank: int = 1
    """CPU threads that step an optimizer in host memory. torchrun's default is one."""

    assumptions: tuple[str, ...] = ()
    """What was not told and therefore supposed, in words."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cpu" if self.gpu.kind == "cpu" else "cuda"

    @property
    def name(self) -> str:
        nodes = f"{self.nodes} x " if self.nodes > 1 else ""
        return f"{nodes}{self.ranks_per_node} x {self.gpu.name}"

    @property
    def cpu_adam_bandwidth(self) -> float:
        """Bytes a second one rank's CPU Adam moves: its threads' share, or its share of memory."""
        threads = self.threads_per_rank * CPU_THREAD_BANDWIDTH
        return min(threads, 0.7 * self.cpu_memory_bandwidth / self.ranks_per_node)


UNHEARD_OF = 1e20
"""Bytes, bytes a second and operations a second stay below it."""

CPU_THREAD_BANDWIDTH = 6 * GB
"""What one thread of a server CPU streams through DeepSpeed's CPU Adam: 8 ranks of a thread each
step 7.2e9 parameters in about 4 s (DeepSpeed#3901), at 28 bytes a parameter."""

ETH100, IB400 = "ethernet-100", "infiniband-400"
CLOUD, HGX = 144 * GB, 256 * GB


def _server(
    name: str,
    memory: float,
    peak: float,
    reached: float,
    gb_s: float,
    *,
    nvlink: float = 0.0,
    pcie: Literal[3, 4, 5] = 4,
    network: str = "ethernet-25",
    host: float = 48 * GB,
) -> GPU:
    return GPU(
        name=name,
        memory_bytes=int(memory * GIB),
        peak_flops=peak * TERA,
        flops=reached * TERA,
        bandwidth=gb_s * GB,
        nvlink=nvlink * GB,
        pcie=pcie,
        network=network,
        host_memory=host,
    )


def _desk(
    name: str,
    memory: float,
    peak: float,
    reached: float,
    gb_s: float,
    *,
    kind: Literal["workstation", "consumer"] = "consumer",
    nvlink: float = 0.0,
    pcie: Literal[3, 4, 5] = 4,
) -> GPU:
    card = _server(name, memory, peak, reached, gb_s, nvlink=nvlink, pcie=pcie, host=64 * GB)
    return replace(card, kind=kind)


def _workstation(name: str, memory: float, peak: float, reached: float, gb_s: float, **more) -> GPU:
    return _desk(name, memory, peak, reached, gb_s, kind="workstation", **more)


_GPUS: tuple[GPU, ...] = (
    _server("B300", 267, 2250, 700, 8000, nvlink=650, pcie=5, network=IB400, host=HGX),
    _server("B200", 178.3, 2250, 700, 8000, nvlink=650, pcie=5, network=IB400, host=HGX),
    _server("H200", 139.8, 989, 390, 4800, nvlink=370, pcie=5, network=IB400, host=HGX),
    _server("H100", 79.1, 989, 375, 3350, nvlink=370, pcie=5, network=IB400, host=HGX),
    _server("H100-PCIe", 79.1, 756, 290, 2000, pcie=5, network=ETH100, host=CLOUD),
    _server("H800", 79.1, 989, 375, 3350, nvlink=160, pcie=5, network=IB400, host=HGX),
    _server("H20", 95.1, 148, 105, 4000, nvlink=370, pcie=5, network=ETH100, host=HGX),
    _server("GH200", 94.5, 989, 375, 4000, pcie=5, network=ETH100, host=480 * GB),
    _server("A100-80GB", 79.1, 312, 150, 2039, nvlink=235, network=ETH100, host=CLOUD),
    _server("A100-40GB", 39.4, 312, 145, 1555, nvlink=235, network=ETH100, host=CLOUD),
    _server("A800", 79.1, 312, 150, 2039, nvlink=160, network=ETH100, host=CLOUD),
    _server("A30", 23.5, 165, 75, 933),
    _server("A40", 44.4, 150, 68, 696, host=64 * GB),
    _server("A10", 22.0, 125, 55, 600),
    _server("A10G", 22.0, 70, 42, 600),
    _server("L4", 22.0, 121, 40, 300),
    _server("L40", 44.4, 181, 90, 864, host=64 * GB),
    _server("L40S", 44.4, 362, 130, 864, host=64 * GB),
    _server("MI250X", 63.9, 191, 80, 1600, nvlink=70, network=ETH100, host=64 * GB),
    _server("MI300X", 191.5, 1307, 400, 5300, nvlink=300, network=IB400, host=HGX),
    # Before Ampere there is no bfloat16 arithmetic: products run in float32.
    _server("V100-32GB", 31.7, 15.7, 12, 900, nvlink=120, pcie=3),
    _server("V100-16GB", 15.7, 15.7, 12, 900, nvlink=120, pcie=3),
    _server("T4", 14.6, 8.1, 5, 320, pcie=3),
    _workstation("A6000", 47.5, 155, 68, 768, nvlink=45),
    _workstation("A5000", 23.6, 111, 52, 768, nvlink=45),
    _workstation("A4000", 15.7, 77, 36, 448),
    _workstation("RTX-6000-Ada", 47.4, 364, 140, 960),
    _workstation("RTX-5000-Ada", 31.5, 261, 105, 576),
    _workstation("RTX-PRO-6000", 94.9, 503, 210, 1792, pcie=5),
    _desk("RTX-5090", 31.3, 210, 140, 1792, pcie=5),
    _desk("RTX-5080", 15.5, 113, 76, 960, pcie=5),
    _desk("RTX-4090", 23.5, 165, 112, 1008),
    _desk("RTX-4080", 15.6, 97, 66, 717),
    _desk("RTX-4070", 11.6, 58, 40, 504),
    _desk("RTX-4060-Ti", 15.6, 44, 30, 288),
    _desk("RTX-3090", 23.6, 71, 56, 936, nvlink=45),
    _desk("RTX-3080", 9.8, 60, 45, 760),
    _desk("RTX-3060", 11.6, 26, 20, 360),
)

_SAYS_NOTHING = re.compile(
    r"nvidia|geforce|tesla|quadro|amd|instinct|rtx|gpu|sxm\d*|hbm\w*|generation|blackwell|workstation"
    r"|server|edition"
)
_NICKNAMES = {"a100pcie": "a100", "a800pcie": "a800", "h100nvl": "h100pcie", "a6000ada": "6000ada"}

# A card that is named by its memory alone: the slowest of that size that people own.
_BY_MEMORY: tuple[tuple[float, str], ...] = (
    (8, "RTX-3080"),
    (10, "RTX-3080"),
    (12, "RTX-3060"),
    (16, "RTX-4080"),
    (24, "RTX-3090"),
    (32, "RTX-5090"),
    (40, "A100-40GB"),
    (48, "A6000"),
    (80, "A100-80GB"),
    (96, "RTX-PRO-6000"),
    (141, "H200"),
    (180, "B200"),
    (192, "MI300X"),
)

# Lane rates that NCCL reaches: (with peer-to-peer access, through the host).
_PCIE = {3: (10 * GB, 6 * GB), 4: (20 * GB, 12.5 * GB), 5: (40 * GB, 25 * GB)}
_SLOW_PCIE = Link("slow-pcie", 3.5 * GB, overlap=0.0, latency=50e-6)
_GLOO = Link("gloo", 1.0 * GB, overlap=0.0, latency=300e-6)
_SHARED_MEMORY_RATE = 40e9
"""Floating-point operations a second of one CPU thread in PyTorch's float32 products."""


def find_machine(
    gpus: str,
    link: str | float | None = None,
    network: str | float | None = None,
    host_memory: float | None = None,
    *,
    flops: float | None = None,
    memory: float | None = None,
    nvme: float | None = None,
) -> Machine:
    """The machine called ``gpus``: ``8xH100``, ``H100``, ``2x24GB``, ``2x8xH100`` (nodes x GPUs),
    ``2xCPU``.

    ``link`` and ``network`` are names (``link_names``, ``network_names``), GB/s, or a rate with its
    unit: ``50GB/s`` is bytes, ``400Gb/s``, ``400Gbit/s`` and ``25gbps`` are bits; ``host_memory``
    is bytes of one node; ``flops`` and ``memory`` (bytes a GPU) replace what is known; ``nvme`` is
    bytes a second. Raises ``ValueError`` for what is not known, with the nearest that is.
    """
    nodes, ranks, name = _count(gpus)
    gpu, said = _find_gpu(name)
    if gpu.kind == "cpu":
        return _cpu_machine(ranks, nodes, host_memory)
    if flops is not None:
        gpu = replace(gpu, flops=_positive("flops", flops))
    if memory is not None:
        gpu = replace(gpu, memory_bytes=int(_positive("memory", memory)))
    inside, about_link = _inside(gpu, link, ranks)
    between, about_network = _between(gpu, network, nodes, ranks)
    host = _positive("host memory", host_memory) if host_memory else gpu.host_memory * ranks
    about_host = () if host_memory else (f"{gib(host)} of host memory a node",)
    return Machine(
        gpu=gpu,
        ranks_per_node=ranks,
        nodes=nodes,
        link=inside,
        network=between,
        host_memory_bytes=int(host),
        host_link=_host_link(gpu, inside),
        cpu_memory_bandwidth=(200 if gpu.kind == "server" else 40) * GB,
        nvme_bandwidth=nvme or (6 if gpu.kind == "server" else 3) * GB,
        assumptions=(*said, *about_link, *about_network, *about_host),
    )


def found_machine(
    name: str,
    memory: int,
    ranks: int,
    *,
    nodes: int = 1,
    link: str | float | None = None,
    network: str | float | None = None,
    host_memory: float | None = None,
) -> Machine:
    """A machine that is there: ``name`` and ``memory`` bytes of each GPU as its driver says.

    A card that is not known by name counts as the known one of the nearest size.
    """
    count = f"{nodes}x{ranks}x"
    try:
        return find_machine(count + name, link, network, host_memory, memory=memory)
    except ValueError:
        size = f"{memory / GIB:.0f}gb"
        return find_machine(count + size, link, network, host_memory, memory=memory)


def gib(size: float) -> str:
    """``size`` bytes as people read them."""
    return f"{size / GIB:.1f} GiB" if size < 100 * GIB else f"{size / GIB:.0f} GiB"


def gpu_names() -> tuple[str, ...]:
    """Every card that is known by name."""
    return tuple(gpu.name for gpu in _GPUS)


def link_names() -> tuple[str, ...]:
    """Every link inside a machine that is known by name."""
    return ("nvlink", "pcie3", "pcie4", "pcie4x8", "pcie5", "slow-pcie")


def network_names() -> tuple[str, ...]:
    """Networks between machines, by name; any rate in Gbit/s may stand in place of these."""
    return (
        "ethernet-10",
        "ethernet-25",
        "ethernet-100",
        "infiniband-100",
        "infiniband-200",
        "infiniband-400",
    )


def _positive(what: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{what} is {value} and must be more than zero")
    if value < 1e-6:
        raise ValueError(f"{what} is {value:g}, which is as good as none")
    if not value < UNHEARD_OF:
        raise ValueError(f"{what} is {value:g}, which no machine has")
    return float(value)


def check_link(link: str | float) -> None:
    """Raise ``ValueError`` for a link that no GPU has."""
    find_machine("2xA100-80GB", link)


def _count(text: str) -> tuple[int, int, str]:
    """(nodes, GPUs a node, name) out of ``2x8xH100``."""
    number = r"(?:([0-9]{1,6})\s*[x*]\s*)?"
    found = re.fullmatch(number + number + "(.+)", text.strip().lower().replace("\u00d7", "x"))
    if not found or re.match(r"[0-9]+\s*[x*]|[x*]", found[3]):
        raise ValueError(
            f"--gpus {text!r} is not COUNTxNAME or NODESxCOUNTxNAME, as in 8xH100, 2x24GB, 2x8xH100"
        )
    counts = [int(count) for count in found.groups()[:2] if count is not None]
    if 0 in counts:
        raise ValueError(f"--gpus {text!r} counts to zero; a machine has at least one GPU")
    nodes, ranks = ([1, 1, *counts])[-2:]
    return nodes, ranks, found[3]


def _plain(name: str) -> tuple[str, int | None]:
    """(name as it is compared, GB in the name): of ``NVIDIA A100-SXM4-80GB``, ``a100`` and 80."""
    words = [word for word in re.split(r"[-_ ]+", name.lower()) if word]
    words = [word.removeprefix("rtx") for word in words if not _SAYS_NOTHING.fullmatch(word)]
    sizes = [int(word[:-2]) for word in words if re.fullmatch(r"\d+gb", word)]
    plain = "".join(word for word in words if not re.fullmatch(r"\d+gb", word))
    return _NICKNAMES.get(plain, plain), sizes[0] if sizes else None


def _find_gpu(text: str) -> tuple[GPU, tuple[str, ...]]:
    """The card and what was supposed about it."""
    if size := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(gb|gib|g)", text):
        return _by_memory(float(size[1]))
    plain, size = _plain(text)
    if plain == "cpu":
        return _cpu(1 * GB), ()
    alike = [gpu for gpu in _GPUS if _plain(gpu.name)[0] == plain]
    if not alike and re.fullmatch(r"[0-9]{1,3}", text):
        raise ValueError(f"GPU {text!r} is not known; did you mean its memory, {text}GB?")
    names = {_plain(gpu.name)[0]: gpu.name for gpu in _GPUS}
    if not alike and (turned := _turned(text)) and _plain(turned[1])[0] in names:
        raise ValueError(f"GPU {text!r} is not known; did you mean {turned[0]}x{turned[1]}?")
    if not alike:
        near = get_close_matches(plain, names, n=3, cutoff=0.4)
        hint = f"the nearest are {', '.join(names[key] for key in near)}; " if near else ""
        raise ValueError(f"GPU {text!r} is not known; {hint}or give its memory, as in 2x24GB")
    if size is None:
        return alike[0], ()
    gpu = min(alike, key=lambda gpu: abs(gpu.memory_bytes / GIB - size))
    if abs(gpu.memory_bytes / GIB - size) < 0.1 * size:
        return gpu, ()
    memory = int(size * 0.985 * GIB)
    return replace(gpu, name=f"{gpu.name}-{size}GB", memory_bytes=memory), ()


def _turned(text: str) -> tuple[str, str] | None:
    """(count, name) of ``8 h100`` and ``h100x8``."""
    found = re.fullmatch(r"([0-9]+) +(.+)|(.+?) *[x*] *([0-9]+)", text)
    return found and ((found[1], found[2]) if found[1] else (found[4], found[3]))


def _by_memory(gigabytes: float) -> tuple[GPU, tuple[str, ...]]:
    """A card of ``gigabytes``, as fast as the known card of the nearest size."""
    if not gigabytes > 0:
        raise ValueError(f"a GPU of {gigabytes:g} GB has no memory")
    if gigabytes > 10_000:
        raise ValueError(f"a GPU of {gigabytes:g} GB is more than any has")
    alike = min(_BY_MEMORY, key=lambda row: abs(row[0] - gigabytes))[1]
    gpu = next(gpu for gpu in _GPUS if gpu.name == alike)
    memory = int(gigabytes * 0.975 * GIB) if gigabytes <= 48 else int(gigabytes * 0.985 * GIB)
    said = f"{gpu.flops / TERA:.0f} TFLOP/s and {gpu.bandwidth / GB:.0f} GB/s a GPU, as of {alike}"
    return replace(gpu, name=f"{gigabytes:g}GB", memory_bytes=memory), (said,)


def _inside(gpu: GPU, link: str | float | None, ranks: int) -> tuple[Link, tuple[str, ...]]:
    if link is None:
        found = _named_link(gpu, _usual_link(gpu, ranks))
        said = f"{found.name} between GPUs, {found.bytes_per_second / GB:.0f} GB/s"
        return found, (said,) if ranks > 1 else ()
    number = _number("link", link)
    if number is not None:
        rate = _positive("link", number) * GB
        return Link(f"{number:g} GB/s", rate, overlap=_overlap(gpu, rate)), ()
    return _named_link(gpu, str(link)), ()


def _usual_link(gpu: GPU, ranks: int) -> str:
    """Boards of GPUs come with NVLink; a bridge between two cards is an extra that few own; and
    desktop boards split 16 lanes between two cards."""
    if gpu.nvlink and gpu.kind == "server":
        return "nvlink"
    return f"pcie{gpu.pcie}" + ("x8" if gpu.kind == "consumer" and ranks > 1 else "")


def _overlap(gpu: GPU, rate: float) -> float:
    """How much of a gather hides under arithmetic on a PCIe link, of which only the rate is known.

    Measured for copies through the host: nothing at 3.5 GB/s, a half at 12.5.
    """
    slow, good = 3.5 * GB, 12.5 * GB
    if gpu.peer_to_peer:
        return 0.0 if rate <= slow else 0.95
    return 0.5 * min(1.0, max(0.0, (rate - slow) / (good - slow)))


def _named_link(gpu: GPU, name: str) -> Link:
    plain = re.sub(r"[-_ .]", "", name.lower())
    if plain == "nvlink":
        if not gpu.nvlink:
            raise ValueError(
                f"{gpu.name} has no NVLink; give --link pcie3, pcie4, pcie5, slow-pcie"
            )
        return Link("nvlink", gpu.nvlink, overlap=1.0, latency=20e-6)
    if plain in ("slowpcie", "pcieslow"):
        return _SLOW_PCIE
    if lanes := re.fullmatch(r"pcie(?:gen)?([345])(?:x(16|8|4))?", plain):
        whole = _PCIE[int(lanes[1])][0 if gpu.peer_to_peer else 1]
        rate = whole * int(lanes[2] or 16) / 16
        width = f"x{lanes[2]}" if lanes[2] else ""
        return Link(f"pcie{lanes[1]}{width}", rate, overlap=_overlap(gpu, rate), latency=40e-6)
    raise ValueError(_unknown("link", name, link_names()))


def _between(
    gpu: GPU, network: str | float | None, nodes: int, ranks: int
) -> tuple[Link, tuple[str, ...]]:
    name = gpu.network if network is None else network
    number = _number("network", name)
    if number is not None:
        rate = _positive("network", number) * GB
        return Link(f"{number:g} GB/s", rate, overlap=0.4, latency=60e-6), ()
    link = _named_network(str(name), ranks)
    if nodes == 1 or network is not None:
        return link, ()
    return link, (f"{link.name} between nodes, {link.bytes_per_second / GB:.1f} GB/s a node",)


def _named_network(name: str, ranks: int) -> Link:
    """Ethernet: one adapter a node, TCP reaches three quarters. InfiniBand: one adapter a GPU."""
    plain = re.sub(r"[-_ /]", "", name.lower())
    found = re.fullmatch(
        r"(ethernet|eth|tcp|infiniband|ib|roce|efa)([0-9]{1,5})(?:g|gb|gbit|gbits)?", plain
    )
    found = found or re.fullmatch(r"()([0-9]{1,5})g(?:be|bit|bits)?", plain)
    if not found or int(found[2]) == 0:
        raise ValueError(_unknown("network", name, network_names()))
    rate = float(found[2]) / 8 * GB
    if found[1] in ("infiniband", "ib", "roce", "efa"):
        return Link(f"infiniband-{found[2]}", 0.9 * rate * ranks, overlap=0.8)
    return Link(f"ethernet-{found[2]}", 0.75 * rate, overlap=0.4, latency=100e-6)


def _host_link(gpu: GPU, link: Link) -> float:
    """Pinned copies between GPU and host: the lanes of a PCIe link, without the detour of a copy
    between two cards that have no peer-to-peer access."""
    whole = _PCIE[gpu.pcie][0]
    if "pcie" not in link.name:
        return whole
    detour = 1.0 if gpu.peer_to_peer else 1.6
    return min(whole, detour * link.bytes_per_second)


BITS = ("Gb/s", "Gbps", "gbps", "Gbit/s", "gbit/s", "Gbits/s", "gbits/s", "GBit/s")
BYTES = ("", "GB/s", "GBps", "GByte/s", "GBytes/s", "gbyte/s", "gbytes/s")


def _number(what: str, text: str | float) -> float | None:
    """GB/s of a number or a rate with its unit; ``None`` for a name.

    Raises ``ValueError`` for a unit of which nobody can say whether it means bits or bytes.
    """
    if isinstance(text, int | float):
        return float(text)
    number = r"(-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"
    found = re.fullmatch(number + r"\s*([A-Za-z/]*)", text.strip())
    if not found:
        return None
    if found[2] in BYTES:
        return float(found[1])
    if found[2] in BITS:
        return float(found[1]) / 8
    if found[2].lower() in ("gb", *(unit.lower() for unit in BITS)):
        raise ValueError(
            f"{what} {text!r} may mean bits or bytes; write {found[1]}GB/s for bytes or "
            f"{found[1]}Gbit/s for bits"
        )
    return None


def _unknown(what: str, name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name.lower(), known, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{what} {name!r} is not known; {hint}known are {', '.join(known)}, or a number in GB/s"


def _cpu(memory: float) -> GPU:
    rate = _SHARED_MEMORY_RATE
    return GPU("CPU", int(memory), rate * 2, rate, 10 * GB, kind="cpu", pcie=3)


def _cpu_machine(ranks: int, nodes: int, host_memory: float | None) -> Machine:
    """CPU ranks share one memory; their collectives are gloo's."""
    host = _positive("host memory", host_memory or 16 * GB)
    said = (f"{gib(host)} of memory",) if host_memory is None else ()
    return Machine(
        gpu=_cpu(host / ranks),
        ranks_per_node=ranks,
        nodes=nodes,
        link=_GLOO,
        network=replace(_GLOO, bytes_per_second=0.9 * GB),
        host_memory_bytes=int(host),
        host_link=10 * GB,
        cpu_memory_bandwidth=20 * GB,
        nvme_bandwidth=2 * GB,
        assumptions=said,
    )
