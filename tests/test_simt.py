"""The simulators against brute force: warps lane by lane, sectors byte by byte, banks word by word, SMs by turns."""

import random

import pytest

from utils.hardware import GPUS, gpu
from utils.simt import (
    If,
    Loop,
    Op,
    access_pattern,
    bank_conflicts,
    bank_passes,
    occupancy,
    run_warp,
    schedule_tiles,
    sectors,
    tile_efficiency,
    tiles,
    touched_sectors,
    waves,
)

H100, A100 = gpu("H100"), gpu("A100")
SEED = 20262

# ---- warps ----

LECTURE = [If(lambda lane: lane < 4, [Op("A"), Op("B")], [Op("X"), Op("Y")]), Op("Z")]


def lane_alone(program, lane):
    """The operations that one thread executes by itself, with nobody to wait for."""
    executed = []
    for node in program:
        if isinstance(node, Op):
            executed.append((node.name, node.cycles))
        elif isinstance(node, If):
            executed += lane_alone(node.then if node.condition(lane) else node.otherwise, lane)
        else:
            for _ in range(node.trips(lane)):
                executed += lane_alone(node.body, lane)
    return executed


def random_program(generator, depth=3):
    nodes = []
    for index in range(generator.randint(1, 3)):
        kind = generator.random() if depth else 0
        if kind < 0.4:
            nodes.append(Op(f"op{depth}{index}", generator.randint(1, 5)))
        elif kind < 0.75:
            lanes = {lane for lane in range(32) if generator.random() < 0.5}
            sides = [random_program(generator, depth - 1), random_program(generator, depth - 1)]
            nodes.append(If(lambda lane, lanes=lanes: lane in lanes, *sides))
        else:
            counts = [generator.randint(0, 3) for _ in range(32)]
            nodes.append(Loop(lambda lane, counts=counts: counts[lane], random_program(generator, depth - 1)))
    return nodes


def test_the_divergent_branch_of_the_lecture_wastes_64_of_160_lane_cycles():
    trace = run_warp(LECTURE)
    assert [step.name for step in trace.steps] == ["A", "B", "X", "Y", "Z"]
    assert [step.active for step in trace.steps] == [4, 4, 28, 28, 32]
    assert (trace.cycles, trace.total_lane_cycles) == (5, 160)
    assert (trace.useful_lane_cycles, trace.wasted_lane_cycles) == (96, 64)
    assert trace.efficiency == 0.6


@pytest.mark.parametrize("seed", range(25))
def test_every_lane_executes_what_it_would_execute_alone(seed):
    program = random_program(random.Random(SEED + seed))
    trace = run_warp(program)
    useful = 0
    for lane in range(32):
        seen = [(name, cycles) for name, mask, cycles in trace.steps if mask[lane]]
        assert seen == lane_alone(program, lane)
        useful += sum(cycles for _, cycles in seen)
    assert trace.useful_lane_cycles == useful
    assert trace.wasted_lane_cycles + trace.useful_lane_cycles == 32 * trace.cycles
    assert all(any(step.mask) for step in trace.steps)


def test_lanes_reconverge_right_after_the_branch():
    nested = [If(lambda i: i % 2, [If(lambda i: i % 4 == 1, [Op("A")]), Op("B")]), Op("C")]
    trace = run_warp(nested)
    assert [(step.name, step.active) for step in trace.steps] == [("A", 8), ("B", 16), ("C", 32)]
    assert [step.path for step in trace.steps] == [("then", "then"), ("then",), ()]


def test_a_loop_waits_for_the_lane_with_the_most_trips():
    trace = run_warp([Loop(lambda lane: lane + 1, [Op("work")])])
    assert len(trace.steps) == 32
    assert [step.active for step in trace.steps] == list(range(32, 0, -1))
    assert trace.efficiency == pytest.approx(33 / 64)


def test_a_partly_filled_warp_wastes_its_empty_lanes():
    trace = run_warp([Op("A", 2)], active_lanes=8)
    assert trace.steps[0].mask == (True,) * 8 + (False,) * 24
    assert trace.efficiency == 0.25


def test_conditions_are_never_asked_about_lanes_that_are_masked_off():
    asked = []
    run_warp([If(lambda i: i < 2, [If(lambda i: asked.append(i) or True, [Op("A")])])])
    assert asked == [0, 1]


def test_an_empty_program_wastes_nothing():
    trace = run_warp([])
    assert (trace.steps, trace.cycles, trace.efficiency) == ((), 0, 1.0)


# ---- sectors ----


@pytest.mark.parametrize("seed", range(30))
def test_sectors_equal_the_distinct_sectors_of_every_byte(seed):
    generator = random.Random(SEED + seed)
    width, unit = generator.choice([1, 2, 4, 8, 16, 20]), generator.choice([32, 64, 128])
    addresses = [generator.randrange(0, 3000) for _ in range(generator.randint(0, 32))]
    every_byte = {byte // unit for address in addresses for byte in range(address, address + width)}
    assert touched_sectors(addresses, width, unit) == every_byte
    assert sectors(addresses, width, unit) == len(every_byte)


@pytest.mark.parametrize("seed", range(20))
def test_an_access_pattern_is_the_sum_over_its_warps(seed):
    generator = random.Random(SEED + seed)
    size, offset = generator.choice([1, 2, 4, 8]), generator.randrange(0, 128)
    indices = [None if generator.random() < 0.2 else generator.randrange(0, 500) for _ in range(100)]
    access = access_pattern(indices, size, offset)
    assert access.warps == 4
    used = requested = lines = 0
    for warp, counted in enumerate(access.sectors_per_warp):
        lanes = [i for i in indices[32 * warp : 32 * warp + 32] if i is not None]
        touched = {offset + i * size + byte for i in lanes for byte in range(size)}
        assert counted == len({byte // 32 for byte in touched})
        used, requested = used + len(touched), requested + size * len(lanes)
        lines += len({byte // 128 for byte in touched})
    assert (access.bytes_used, access.bytes_requested, access.lines) == (used, requested, lines)
    assert access.sectors == sum(access.sectors_per_warp)
    assert access.bytes_moved == 32 * access.sectors
    assert access.efficiency == used / access.bytes_moved <= 1


def test_a_pattern_without_lanes_moves_nothing():
    assert access_pattern([], 4).efficiency == 1
    assert access_pattern([None] * 32, 4).sectors == 0
    assert sectors([], 4) == bank_conflicts([]) == 0


# ---- banks ----


@pytest.mark.parametrize("seed", range(20))
def test_passes_equal_the_most_words_asked_of_a_bank_in_each_phase(seed):
    generator = random.Random(SEED + seed)
    width = generator.choice([1, 2, 4])
    words = [None if generator.random() < 0.2 else width * generator.randrange(0, 200) for _ in range(32)]
    expected = []
    for start in range(0, 32, 32 // width):
        phase = [word for word in words[start : start + 32 // width] if word is not None]
        wanted = {word + each for word in phase for each in range(width)}
        if wanted:
            expected.append(max(len([word for word in wanted if word % 32 == bank]) for bank in range(32)))
    assert bank_passes(words, 4 * width) == expected
    assert bank_conflicts(words, 4 * width) == max(expected, default=0)


# ---- occupancy ----


def test_the_reserved_kibibyte_decides_at_the_edge():
    assert occupancy(H100, 128, 32, 113 * 1024).blocks_per_sm == 2  # 2 x (113 + 1) KiB = 228 KiB
    assert occupancy(H100, 128, 32, 113 * 1024 + 1).blocks_per_sm == 1
    assert occupancy(gpu("V100"), 128, 32, 48 * 1024).blocks_per_sm == 2  # nothing is reserved on Volta


@pytest.mark.parametrize("name", GPUS)
def test_one_more_block_would_break_a_limit_and_those_resident_break_none(name):
    device, generator = GPUS[name], random.Random(SEED)
    checked = 0
    for _ in range(60):
        threads = generator.randint(1, generator.choice((32, device.max_threads_per_block)))
        registers = generator.randint(1, generator.choice((32, 255)))
        shared = generator.choice((0, generator.randint(0, device.max_shared_memory_per_block)))
        try:
            result = occupancy(device, threads, registers, shared)
        except ValueError:
            continue
        checked += 1
        warps = -(-threads // 32)
        unit = device.shared_memory_allocation_unit
        per_block = -(-(shared + device.reserved_shared_memory_per_block) // unit) * unit
        per_warp = -(-registers * 32 // 256) * 256

        def fits(blocks, warps=warps, per_block=per_block, per_warp=per_warp):
            fullest_scheduler = -(-blocks * warps // device.schedulers_per_sm)
            return {
                "warps": blocks * warps <= device.max_warps_per_sm,
                "blocks": blocks <= device.max_blocks_per_sm,
                "registers": fullest_scheduler * per_warp * device.schedulers_per_sm <= device.registers_per_sm,
                "shared memory": blocks * per_block <= device.shared_memory_per_sm,
            }

        assert all(fits(result.blocks_per_sm).values())
        broken = [limit for limit, holds in fits(result.blocks_per_sm + 1).items() if not holds]
        assert broken[0] == result.limiter
        assert result.limits[result.limiter] == result.blocks_per_sm
        assert result.warps_per_sm == result.blocks_per_sm * warps == result.fraction * device.max_warps_per_sm
    assert checked > 10


# ---- tiles and waves ----


def test_one_column_more_needs_22_more_tiles_and_a_second_wave():
    assert tiles(1792, 1792, 256, 128) == 98
    assert tiles(1793, 1793, 256, 128) == 120
    before, after = waves(98, A100.sms), waves(120, A100.sms)
    assert (before.count, after.count, after.tail_tiles) == (1, 2, 12)
    assert after.efficiency == 120 / 216
    assert tile_efficiency(1792, 1792, 256, 128) == 1
    assert tile_efficiency(1793, 1793, 256, 128) == pytest.approx(1793**2 / (120 * 256 * 128))


@pytest.mark.parametrize("seed", range(20))
def test_tiles_cover_the_output_and_no_row_of_tiles_is_idle(seed):
    generator = random.Random(SEED + seed)
    m, n, tile_m, tile_n = (generator.randint(1, 40) for _ in range(4))
    owners = {(row // tile_m, column // tile_n) for row in range(m) for column in range(n)}
    assert tiles(m, n, tile_m, tile_n) == len(owners)


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_of_equal_tiles_takes_as_many_rounds_as_there_are_waves(seed):
    generator = random.Random(SEED + seed)
    count, sms, per_sm = generator.randint(1, 300), generator.randint(1, 20), generator.randint(1, 3)
    schedule, expected = schedule_tiles(count, sms, per_sm, 2.0), waves(count, sms, per_sm)
    assert max(place.end for place in schedule) == 2.0 * expected.count
    last = [place for place in schedule if place.start == 2.0 * (expected.count - 1)]
    assert len(last) == expected.tail_tiles
    assert expected.efficiency == count / (expected.count * sms * per_sm)
    assert expected.slots == sms * per_sm


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_starts_each_tile_on_the_slot_that_is_free_first(seed):
    generator = random.Random(SEED + seed)
    sms, per_sm = generator.randint(1, 6), generator.randint(1, 3)
    durations = [generator.randint(1, 9) for _ in range(generator.randint(1, 60))]
    schedule = schedule_tiles(len(durations), sms, per_sm, durations)
    assert [place.tile for place in schedule] == list(range(len(durations)))
    free = {(sm, slot): 0 for sm in range(sms) for slot in range(per_sm)}
    for place, duration in zip(schedule, durations, strict=True):
        assert place.start == free[place.sm, place.slot] == min(free.values())
        assert place.end == place.start + duration
        free[place.sm, place.slot] = place.end
    starts = [place.start for place in schedule]
    assert starts == sorted(starts)


def test_every_sm_gets_a_first_tile_before_any_gets_a_second():
    schedule = schedule_tiles(5, sms=3, per_sm=2)
    assert [(place.sm, place.slot) for place in schedule] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]
    assert schedule_tiles(2, 1)[1] == (0, 1, 1.0, 2.0, 0)


# ---- bad input ----


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Op("A", 0), r"cycles of operation 'A' must be at least 1, got 0"),
        (lambda: run_warp([], warp_size=0), r"warp_size must be at least 1, got 0"),
        (lambda: run_warp([], active_lanes=33), r"active_lanes must be between 1 and 32, got 33"),
        (lambda: run_warp([Loop(lambda lane: -lane, [Op("A")])]), r"trips must not be negative, got -1 for lane 1"),
        (lambda: sectors([-4], 4), r"byte addresses must not be negative, got -4"),
        (lambda: sectors([0], 0), r"access_bytes must be at least 1, got 0"),
        (lambda: sectors([0], 4, sector=-32), r"sector must be at least 1, got -32"),
        (lambda: access_pattern([3, -1], 4), r"element indices must not be negative, got -1"),
        (lambda: access_pattern([0], 4, base_offset=-1), r"base_offset must not be negative, got -1"),
        (lambda: bank_conflicts(range(33)), r"those of one warp, at most 32, got 33"),
        (lambda: bank_conflicts([1], 8), r"8-byte accesses must start at multiples of 2 words, got word 1"),
        (lambda: bank_conflicts([0], 2), r"access_bytes must be 4, 8 or 16, got 2"),
        (lambda: occupancy(H100, 2048, 32), r"threads_per_block must be between 1 and 1024 on H100, got 2048"),
        (lambda: occupancy(H100, 128, 256), r"registers_per_thread must be between 0 and 255 on H100, got 256"),
        (lambda: occupancy(gpu("T4"), 128, 32, 99 * 1024), r"shared_memory_per_block .* 65536 on T4, got 101376"),
        (lambda: occupancy(H100, 1024, 128), r"a block of 1024 threads with 128 registers each does not fit the 65536"),
        (lambda: tiles(0, 1, 1, 1), r"m must be at least 1, got 0"),
        (lambda: waves(-98, 108), r"num_tiles must be at least 1, got -98"),
        (lambda: schedule_tiles(3, 2, durations=[1, 2]), r"one per tile \(3\), got 2"),
        (lambda: schedule_tiles(2, 2, durations=[1, 0]), r"durations must be positive and finite, got 0.0 for tile 1"),
        (lambda: schedule_tiles(1, 1, durations=float("inf")), r"positive and finite, got inf for tile 0"),
    ],
)
def test_bad_values_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Op("A", 1.5), r"cycles of operation 'A' must be an integer, got 1.5"),
        (lambda: run_warp(5), r"program must be a list of Op, If and Loop, got 5"),
        (lambda: run_warp([], 32, 1.5), r"active_lanes must be an integer, got 1.5"),
        (lambda: If(3, []), r"condition of an If is a function of the lane, .* got 3"),
        (lambda: If(bool, Op("A")), r"then must be a list of Op, If and Loop, got Op\("),
        (lambda: Loop(3, []), r"trips of a Loop is a function of the lane, .* got 3"),
        (lambda: run_warp(["A"]), r"a program is made of Op, If and Loop, got 'A'"),
        (lambda: run_warp([Loop(lambda lane: 0.5, [])]), r"trips must give an integer, got 0.5 for lane 0"),
        (lambda: sectors([1.0], 4), r"byte addresses must be integers, got 1.0"),
        (lambda: access_pattern(["a"], 4), r"element indices must be integers, got 'a'"),
        (lambda: occupancy("H100", 128, 32), r"gpu must be an entry of the hardware table"),
        (lambda: occupancy(H100, 128.0, 32), r"threads_per_block must be an integer, got 128.0"),
        (lambda: waves(98.0, 108), r"num_tiles must be an integer, got 98.0"),
    ],
)
def test_bad_types_are_refused_by_name(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_addresses_may_come_from_numpy_and_torch():
    import numpy
    import torch

    assert sectors(numpy.arange(32) * 4, 4) == sectors(torch.arange(32) * 4, 4) == 4
    assert access_pattern(torch.arange(64), 2).sectors == 4
    assert bank_conflicts(numpy.arange(32) * 2) == 2
