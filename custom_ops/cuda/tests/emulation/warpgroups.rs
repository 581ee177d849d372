//! Warpgroup products (`wgmma`), which plans use where `Options::wgmma` asks for them.

use moa_cuda::plan::{Launch, Plan, Regime};
use moa_cuda::{Buffer, Device, Element, Options, Parameters};
use moa_schema::{FeedForwardDims, SelfAttentionDims};

use crate::emulator::{Tensors, try_run};
use crate::support::{Random, decode, encode, matmul, widen};
use crate::{attention, feed_forward};

/// One multiprocessor, so that few tiles are many; some tests have others.
const HOPPER: Device = Device { compute_capability: (9, 0), multiprocessors: 1, shared_bytes_per_block: 232_448 };

const WGMMA: Options = Options { tf32: false, wgmma: true };

/// Rows of the tiles of warpgroup products.
const TILES: [u32; 2] = [64, 128];

/// Launches of tiles of warpgroup products of so many rows.
fn count(plan: &Plan, rows: u32) -> usize {
    let is_product = |kernel: &str| kernel.contains("_wgmma_") && kernel.ends_with(&format!("_{rows}x128"));
    plan.launches.iter().filter(|launch| is_product(&launch.kernel)).count()
}

/// The device whose plan has most tiles of so many rows: how many multiprocessors there are decides.
fn device_with(rows: u32, mut plan: impl FnMut(Device) -> Plan) -> Device {
    let devices = (1..=24).map(|multiprocessors| Device { multiprocessors, ..HOPPER });
    let (device, launches) =
        devices.map(|device| (device, count(&plan(device), rows))).max_by_key(|(_, n)| *n).unwrap();
    assert!(launches > 0, "no device has tiles of {rows} rows");
    device
}

/// Every expert for every token: whole and ragged tiles, columns alone and in pairs, keys and values; addresses that
/// allow vectors and that do not.
#[test]
fn dense_attention() {
    for (tokens, past, width, head, kv_heads, element, rotates, offset) in [
        (257, 3, 72, 24, 1, Element::F16, false, 0),
        (260, 0, 136, 144, 1, Element::Bf16, true, 0),
        (300, 0, 64, 8, 2, Element::F16, true, 8),
    ] {
        let mut random = Random(tokens as u64);
        let dims = SelfAttentionDims { batch: 1, tokens, past, width, experts: 2, top_k: 2, kv_heads, head };
        let mut case = loop {
            let case = attention::Case::random(&mut random, dims, element, false);
            if case.rotation.is_some() == rotates {
                break case;
            }
        };
        (case.options, case.offset) = (WGMMA, offset);
        for rows in TILES {
            case.device = device_with(rows, |device| {
                case.device = device;
                case.plan()
            });
            assert_eq!(case.check(), Regime::Dense);
        }
    }
}

/// Blocks that stay: every expert for every token and listed rows, whole and ragged tiles, heads that rotate; addresses
/// that allow vectors and that do not.
#[test]
fn products_of_blocks_that_stay() {
    // Batch, tokens, past, width, experts, chosen ones, heads, head width, whether it rotates, and bytes behind an
    // aligned address.
    let cases = [
        (1, 300, 3, 72, 2, 2, 2, 64, false, 0, Regime::Dense),
        (2, 70, 2, 136, 3, 3, 3, 128, true, 0, Regime::Dense),
        (3, 100, 0, 88, 4, 2, 1, 64, false, 8, Regime::Grouped),
        (2, 165, 0, 64, 4, 2, 2, 128, true, 0, Regime::Grouped),
        (1, 700, 0, 200, 5, 2, 5, 64, false, 0, Regime::GroupedReduce),
        (1, 150, 0, 64, 2, 2, 1, 128, true, 8, Regime::Dense),
        (1, 530, 70, 24, 4, 2, 1, 64, false, 0, Regime::Grouped),
        (1, 560, 0, 16, 33, 8, 1, 64, false, 0, Regime::GroupedReduce),
    ];
    for (index, (batch, tokens, past, width, experts, top_k, kv_heads, head, rotates, offset, regime)) in
        cases.into_iter().enumerate()
    {
        let is_cross = index == 6;
        let mut random = Random(index as u64);
        let dims = SelfAttentionDims { batch, tokens, past, width, experts, top_k, kv_heads, head };
        let element = [Element::F16, Element::Bf16][index % 2];
        let mut case = loop {
            let case = attention::Case::random(&mut random, dims, element, is_cross);
            if case.rotation.is_some() == rotates {
                break case;
            }
        };
        (case.options, case.offset) = (WGMMA, offset);
        case.device = Device { multiprocessors: index as u32 % 2 + 1, ..HOPPER };
        let kernels: Vec<_> = case.plan().launches.into_iter().map(|launch| launch.kernel).collect();
        let stays = kernels.iter().filter(|kernel| kernel.ends_with("_wgmma_128x256")).count();
        assert_eq!(stays, 2, "case {index}: {kernels:?}");
        assert_eq!(case.check(), regime);
    }
}

/// Listed rows, and rows that are left out; matrices of one and of several segments.
#[test]
fn grouped_feed_forward() {
    for (tokens, width, hidden, experts, element, regime) in [
        (520, 72, 136, 4, Element::F16, Regime::Grouped),
        (530, 200, 24, 4, Element::Bf16, Regime::Grouped),
        (650, 136, 72, 5, Element::F16, Regime::GroupedReduce),
    ] {
        for gated in [false, true] {
            let mut random = Random(tokens as u64);
            let dims = FeedForwardDims { batch: 1, tokens, width, experts, top_k: 2, hidden };
            let mut case = loop {
                let case = feed_forward::Case::random(&mut random, dims, element);
                if case.attributes.gated == gated {
                    break case;
                }
            };
            case.options = WGMMA;
            for rows in TILES {
                case.device = device_with(rows, |device| {
                    case.device = device;
                    case.plan()
                });
                assert_eq!(case.check(), regime);
            }
            case.device = HOPPER;
            assert!(case.plan().launches.iter().any(|launch| launch.kernel == "moa_output_wgmma_128x256"));
            assert_eq!(case.check(), regime);
        }
    }
}

/// The router of many tokens, on tensor cores: experts of one pass and of two, a width that its warps share unevenly,
/// and more experts than it takes.
#[test]
fn routers_of_many_tokens() {
    for (experts, top_k, width, element) in [
        (12, 3, 104, Element::F16),
        (33, 2, 104, Element::Bf16),
        (40, 3, 520, Element::F16),
        (72, 2, 64, Element::Bf16),
    ] {
        let mut random = Random(experts as u64);
        let (tokens, kv_heads) = (330, 2);
        let dims = SelfAttentionDims { batch: 1, tokens, past: 0, width, experts, top_k, kv_heads, head: 64 };
        let mut case = attention::Case::random(&mut random, dims, element, false);
        case.options = WGMMA;
        for rows in TILES {
            case.device = device_with(rows, |device| {
                case.device = device;
                case.plan()
            });
            let first = &case.plan().launches[0];
            assert!(first.kernel.contains("_wgmma_"), "{} has no such router", first.kernel);
            assert_eq!(first.parameters.route_splits, 1, "each block has its tokens for itself");
            assert_eq!(case.check(), Regime::GroupedReduce);
        }
    }
}

/// Tiles of queries and keys, whole and ragged, of every width of heads; causal and not, masked, behind a past.
#[test]
fn attention_of_many_queries() {
    for (index, (tokens, past, head, top_k, kv_heads, is_cross)) in [
        (70, 130, 40, 3, 2, false),
        (40, 0, 64, 2, 1, false),
        (33, 100, 128, 2, 1, true),
        (50, 20, 72, 4, 1, false),
        (33, 70, 200, 4, 1, false),
        (75, 64, 256, 1, 1, true),
        // A tile's keys are all there before its queries are read, and so may be those of the next.
        (140, 50, 64, 2, 1, false),
    ]
    .into_iter()
    .enumerate()
    {
        for (element, causal) in [(Element::F16, true), (Element::Bf16, false)] {
            let mut random = Random(index as u64);
            let dims = SelfAttentionDims { batch: 2, tokens, past, width: 24, experts: 4, top_k, kv_heads, head };
            let mut case = attention::Case::random(&mut random, dims, element, is_cross);
            // Blocks that stay take several tiles, to and fro.
            let tiles = (tokens * top_k).div_ceil(128) * 2 * kv_heads;
            let multiprocessors = ((index as u32 + 2) % 3 + 1).min(tiles as u32 / 2);
            (case.device, case.options) = (Device { multiprocessors, ..HOPPER }, WGMMA);
            case.attributes.causal = causal && !is_cross;
            case.offset = if index == 1 { 8 } else { 0 };
            // Where no key is masked, the end of the keys and the causal limit hide scores alone.
            if index % 2 == 0 {
                case.key_mask.fill(1);
            }
            let kernels: Vec<_> = case.plan().launches.into_iter().map(|launch| launch.kernel).collect();
            let width = head.next_power_of_two().max(64);
            assert!(kernels.contains(&format!("moa_attend_wgmma_d{width}_r128")), "{kernels:?}");
            case.check();
        }
    }
}

/// Scores of later keys are ever larger, by more than weights beside the maxima before may come to, in rows of all
/// tokens and of some: causal ones see few of them.
#[test]
fn maxima_that_grow() {
    for (index, (tokens, past, head, top_k, causal)) in
        [(70, 330, 64, 2, true), (40, 400, 128, 4, false), (35, 420, 128, 4, true), (40, 300, 256, 4, false)]
            .into_iter()
            .enumerate()
    {
        let mut random = Random(index as u64);
        let dims = SelfAttentionDims { batch: 1, tokens, past, width: 24, experts: 4, top_k, kv_heads: 1, head };
        // Whose queries are rounded little enough beside such scores.
        let mut case = loop {
            let case = attention::Case::random(&mut random, dims, Element::F16, false);
            if case.key_mask.iter().all(|&mask| mask != 0) {
                break case;
            }
        };
        for (key, row) in case.past_key.chunks_mut(head).enumerate() {
            row.iter_mut().for_each(|value| *value *= f32::powi(2.0, (key / 100) as i32));
        }
        case.options = WGMMA;
        case.device = HOPPER;
        case.attributes.causal = causal;
        let kernels: Vec<_> = case.plan().launches.into_iter().map(|launch| launch.kernel).collect();
        assert!(kernels.iter().any(|kernel| kernel.contains("_attend_wgmma_")), "{kernels:?}");
        case.check();
    }
}

/// One kernel of `kernels/emulator/probe.cpp`.
#[derive(Debug, Clone, Copy)]
struct Probe {
    kernel: &'static str,
    /// Threads of a block.
    threads: u32,
    rows: usize,
    swizzle: i32,
    columns_in_line: bool,
    mistake: i32,
}

impl Probe {
    const COLUMNS: usize = 128;
    const DEPTH: usize = 64;

    /// One warpgroup.
    fn product(swizzle: i32, columns_in_line: bool, mistake: i32) -> Self {
        Self { kernel: "moa_probe_warpgroup", threads: 128, rows: 64, swizzle, columns_in_line, mistake }
    }

    /// Two that multiply and one that copies, one half of the rows after the other.
    fn signals(mistake: i32) -> Self {
        let (kernel, threads, rows) = ("moa_probe_signals", 384, 128);
        Self { kernel, threads, rows, swizzle: 1, columns_in_line: true, mistake }
    }

    /// The largest error of the product, or what the emulator complains of.
    fn run(self) -> Result<f64, String> {
        let (rows, columns, depth) = (self.rows, Self::COLUMNS, Self::DEPTH);
        let mut random = Random(7);
        let a = random.values(Element::F16, rows * depth, 1.0);
        let b = random.values(Element::F16, depth * columns, 1.0);
        let transposed: Vec<f32> = (0..columns * depth).map(|i| b[i % depth * columns + i / depth]).collect();
        let parameters = Parameters {
            hidden_states: Buffer::Input(0),
            input_weight: Buffer::Input(1),
            kv_weight: Buffer::Input(2),
            output: Buffer::Output(0),
            gate_mode: self.swizzle,
            gated: i32::from(self.columns_in_line),
            activation: self.mistake,
            ..Parameters::default()
        };
        let launch = Launch {
            element: Element::F16,
            kernel: self.kernel.into(),
            grid: 1,
            block: self.threads,
            shared_bytes: (2 * depth * (64 + columns) + 16) as u32,
            overlap: false,
            parameters,
        };
        let inputs = [&a, &b, &transposed].map(|values| Some(encode(Element::F16, values)));
        let outputs = vec![Some(4 * rows * columns)];
        let plan = Plan { launches: vec![launch], workspace_bytes: 0, regime: Regime::Dense };
        let results = try_run(&plan, &Tensors { inputs: inputs.into(), outputs, ..Tensors::default() })?;
        let found = decode(Element::F32, results.outputs[0].as_ref().unwrap());
        let expected = matmul(&widen(&a), &widen(&b), rows, depth, columns);
        let error = found.iter().zip(&expected).map(|(found, expected)| (f64::from(*found) - expected).abs());
        Ok(error.fold(0.0, |largest, error| if error > largest || error.is_nan() { error } else { largest }))
    }

    /// Its mistake is complained of, or makes a wrong result where no complaint is expected.
    fn fails_with(self, complaint: &str) {
        match self.run() {
            Ok(error) => {
                assert!(
                    complaint.is_empty() && (error.is_nan() || error > 0.1),
                    "{self:?} is not found: error {error}"
                );
            }
            Err(message) => assert!(message.contains(complaint), "{self:?}: {message}"),
        }
    }
}

#[test]
fn every_layout_of_a_descriptor() {
    for swizzle in 0..4 {
        for columns_in_line in [false, true] {
            let probe = Probe::product(swizzle, columns_in_line, 0);
            let error = probe.run().unwrap();
            assert!(error < 1e-4, "{probe:?}: {error}");
        }
    }
}

/// A mistake, by its number in the probe, is complained of or makes a wrong result.
#[test]
fn mistakes_are_found() {
    for (mistake, complaint) in [
        (1, "not waited for, handed over"),
        (2, "not waited for, handed over"),
        (3, "not waited for, handed over"),
        (4, "without a fence"),
        (5, "never waited for"),
        (6, "never waited for"),
        (7, ""),
        (8, "that a product under way owns"),
        (9, "not waited for, handed over"),
        (10, ""),
        (11, ""),
        (12, ""),
        (13, "a base offset"),
        (14, "waits for ever"),
        (29, "said to have alike"),
    ] {
        Probe::product(1, true, mistake).fails_with(complaint);
    }
}

/// The same of signals between warpgroups.
#[test]
fn mistakes_at_signals_are_found() {
    let error = Probe::signals(0).run().unwrap();
    assert!(error < 1e-4, "{error}");
    for (mistake, complaint) in [
        (15, "not begun in front of a barrier"),
        (16, "not begun in front of a barrier"),
        (17, "wrote over a signal"),
        (18, "not waited for, handed over"),
        (19, "not waited for, handed over"),
        (20, "not waited for, handed over"),
        (21, "not waited for, handed over"),
        (22, "would take for another one"),
        (23, "waits for ever"),
        (24, "not waited for, handed over"),
        (25, ""),
        (26, "waited for the grid in front"),
        (27, "registers that its block was not given"),
        (28, "not waited for, handed over"),
    ] {
        Probe::signals(mistake).fails_with(complaint);
    }
}
