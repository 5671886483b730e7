//! Ranks that exchange what they read together write what one process writes.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::catalog::{OutputFile, Reserved, Summands, TensorId};
use crate::comm::{Communicator, Local};
use crate::exec::Silent;
use crate::exec::exchange::{
    Counting, Exchange, HostShuffle, Load, Moves, Owners, Parties, Rounds, Shuffle, Sight, agree,
};
use crate::layout::partial::{Reduction, Share};
use crate::layout::{ReduceOp, Region};
use crate::storage::FileId;

/// How ranks exchange.
pub(crate) trait Means: Sync {
    /// What a rank has for it.
    type Seat: Send;
    type Rank: Communicator;

    /// Called in the thread of each rank, at the same time for all.
    fn seat(&self, rank: Local) -> Self::Seat;

    fn rank(seat: &Self::Seat) -> &Self::Rank;

    fn shuffle(seat: &Self::Seat) -> impl Shuffle;

    /// Bytes that the rank has sent and received, where they are counted.
    fn counted(_: &Self::Seat) -> Option<(u64, u64)> {
        None
    }
}

/// In host memory.
struct Host;

impl Means for Host {
    type Seat = Counted;
    type Rank = Counted;

    fn seat(&self, rank: Local) -> Counted {
        Counted { rank, sent: AtomicU64::new(0), received: AtomicU64::new(0) }
    }

    fn rank(seat: &Counted) -> &Counted {
        seat
    }

    fn shuffle(seat: &Counted) -> impl Shuffle {
        HostShuffle::new(seat)
    }

    fn counted(seat: &Counted) -> Option<(u64, u64)> {
        Some((seat.sent.load(Ordering::Relaxed), seat.received.load(Ordering::Relaxed)))
    }
}

/// A rank whose bytes are counted; what all others are given counts once for who gives it.
struct Counted {
    rank: Local,
    sent: AtomicU64,
    received: AtomicU64,
}

impl Counted {
    fn count(&self, sent: &[Range<usize>], received: &[Range<usize>]) {
        let bytes = |ranges: &[Range<usize>]| ranges.iter().map(|range| range.len() as u64).sum();
        self.sent.fetch_add(bytes(sent), Ordering::Relaxed);
        self.received.fetch_add(bytes(received), Ordering::Relaxed);
    }
}

impl Communicator for Counted {
    type Memory = Vec<u8>;

    fn rank(&self) -> u32 {
        self.rank.rank()
    }

    fn size(&self) -> u32 {
        self.rank.size()
    }

    fn exchange(
        &self,
        outgoing: &Vec<u8>,
        to: &[Range<usize>],
        incoming: &mut Vec<u8>,
        from: &[Range<usize>],
    ) -> Result<()> {
        self.count(to, from);
        self.rank.exchange(outgoing, to, incoming, from)
    }

    fn all_gather(&self, memory: &mut Vec<u8>, ranges: &[Range<usize>]) -> Result<()> {
        let (before, own) = ranges.split_at(self.rank.rank() as usize);
        let (own, behind) = own.split_at(1);
        self.count(own, &[before, behind].concat());
        self.rank.all_gather(memory, ranges)
    }

    fn gather(&self, said: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.rank.gather(said)
    }

    fn check(&self) -> Result<()> {
        self.rank.check()
    }

    fn fail(&self, why: &str) {
        self.rank.fail(why);
    }

    fn leave(self) -> Result<()> {
        self.rank.leave()
    }
}

/// A checkpoint of a file for each rank of the job that saved it, and one that is laid out.
pub(crate) struct Case {
    folder: tempfile::TempDir,
    files: Files,
    catalog: Catalog,
    reservation: Reservation,
}

/// A tensor to convert: shape, dtypes, both layouts, and how many summands ranks hold of it, if they do.
pub(crate) type Spec = (Vec<u64>, (Dtype, Dtype), Layout, Layout, Option<(u64, ReduceOp)>);

impl Case {
    pub(crate) fn new(specs: &[Spec], transpose: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut stored: Vec<Vec<u8>> = Vec::new();
        let (mut entries, mut targets) = (Vec::new(), Vec::new());
        let mut outputs: Vec<OutputFile> = Vec::new();
        for (number, (shape, (from_dtype, to_dtype), from, to, summands)) in specs.iter().enumerate() {
            let id = TensorId(u32::try_from(number).unwrap());
            let mut entry = TensorEntry::new(format!("t{number}").into(), *from_dtype, shape.as_slice().into());
            let mut of_chunk = Vec::new();
            let count = summands.map_or(1, |(count, _)| count);
            for summand in 0..count {
                let path = folder.path().join("stored");
                let value = |index: u64| match summands {
                    Some(_) => term(*from_dtype, index, summand),
                    None => element(index, from_dtype.itemsize()),
                };
                let (_, one) = store_values(shape, *from_dtype, from, transpose, IoMode::Read, &path, &value);
                let bytes = fs::read(&path).unwrap();
                for (rank, mut chunk) in one.chunks.iter().enumerate() {
                    // Ranks that hold one summand are others than those of the next.
                    let rank = rank * usize::try_from(count).unwrap() + usize::try_from(summand).unwrap();
                    stored.resize(stored.len().max(rank + 1), vec![0xEE; 7]);
                    if let Place::Bytes { file, offset } = &mut chunk.place {
                        let start = usize::try_from(*offset).unwrap();
                        let len = usize::try_from(chunk.tile.numel() * from_dtype.itemsize()).unwrap();
                        *file = FileId(u32::try_from(rank).unwrap());
                        *offset = stored[rank].len() as u64;
                        stored[rank].extend_from_slice(&bytes[start..start + len]);
                    }
                    entry.chunks.push(chunk);
                    of_chunk.push(summand);
                }
            }
            if let Some((count, op)) = summands {
                let reduction = Reduction::of(&[*count], &[Placement::Partial(*op)]).unwrap().unwrap();
                entry.summands = Some(Box::new(Summands { reduction, of_chunk }));
            }
            let mut target = TensorEntry::new(entry.fqn.clone(), *to_dtype, shape.as_slice().into());
            for (rank, tile) in to.tiles(shape).into_iter().enumerate() {
                if outputs.len() <= rank {
                    outputs.push(OutputFile::new(format!("out{rank}")));
                }
                let file = &mut outputs[rank];
                file.push_literal(vec![9; 3 + number]);
                let mut place = Place::Nowhere;
                if !tile.is_empty() {
                    let offset = file.push_payload(tile.numel() * to_dtype.itemsize());
                    place = Place::Bytes { file: FileId(u32::try_from(rank).unwrap()), offset };
                }
                target.chunks.push(Chunk { tile, place, strides: None, rank: None });
            }
            targets.push(Reserved::new(id, target));
            entries.push(entry);
        }
        let mut files = Files::new(IoMode::Read);
        for (rank, bytes) in stored.iter().enumerate() {
            let path = folder.path().join(format!("in{rank}"));
            fs::write(&path, bytes).unwrap();
            files.add(path).unwrap();
        }
        let reservation = Reservation { files: outputs, tensors: targets, ..Reservation::default() };
        Self { folder, files, catalog: Catalog { tensors: entries, ..Catalog::empty() }, reservation }
    }

    /// With targets that get shares of it: sums of a part of the tensor and nothing elsewhere, summands as they are, and
    /// parts of values.
    pub(crate) fn with_shares(mut self) -> Self {
        for tensor in &mut self.reservation.tensors {
            let source = &self.catalog.tensors[tensor.source.0 as usize];
            let shares = |of_chunk: &dyn Fn(usize) -> Share| {
                (0..tensor.entry.chunks.len()).map(|chunk| Arc::new(of_chunk(chunk))).collect()
            };
            tensor.shares = match &source.summands {
                Some(summands) => {
                    let sizes: Dims = source.shape.iter().map(|size| size.div_ceil(2)).collect();
                    let part = Tile::from_region(&Region::new(smallvec::smallvec![0; sizes.len()], sizes));
                    let whole = summands.reduction.whole();
                    let own = |chunk: usize| chunk as u64 % summands.reduction.count();
                    shares(&|chunk| match chunk % 3 {
                        0 => Share { within: Some(part.clone()), ..whole.clone() },
                        1 => Share { summands: vec![own(chunk)], divisor: 1, within: None },
                        _ => whole.clone(),
                    })
                }
                None if source.dtype.is_float() => shares(&|_| Share { summands: vec![0], divisor: 4, within: None }),
                None => continue,
            };
        }
        self
    }

    fn input(&self) -> Input<'_> {
        Input { files: &self.files, catalog: &self.catalog, resolve: &resolve }
    }

    pub(crate) fn alone(&self) -> Vec<Vec<u8>> {
        let folder = self.folder.path().join("alone");
        fs::create_dir(&folder).unwrap();
        copy(self.input(), &self.reservation, &folder, &options(), &Silent, &Stop::default()).unwrap();
        self.written(&folder)
    }

    pub(crate) fn together<M: Means>(
        &self,
        means: &M,
        parties: &Parties,
        todos: &[Extents],
        bucket_bytes: u64,
    ) -> (Vec<Vec<u8>>, Vec<Load>) {
        let folder = self.folder.path().join("together");
        fs::create_dir(&folder).unwrap();
        let ranks = Local::fleet(parties.size());
        std::thread::scope(|scope| {
            let threads: Vec<_> = ranks
                .into_iter()
                .zip(todos)
                .map(|(rank, todo)| {
                    let folder = &folder;
                    scope.spawn(move || {
                        let seat = means.seat(rank);
                        let rank = M::rank(&seat);
                        let heard = agree(rank, &self.reservation.files, todo).unwrap();
                        assert_eq!(heard, todos);
                        let owners = Owners::new(&self.reservation.files, &heard);
                        let files = self.files.clone();
                        let input = Input { files: &files, ..self.input() };
                        let (reservation, owners) = (&self.reservation, &owners);
                        let exchange = Exchange { input, reservation, parties, owners, bucket_bytes };
                        let path = folder.join(format!("{}.journal", rank.rank()));
                        let log = Log::new(&reservation.files, todo, path, false, AtEnd::Nothing);
                        let shuffle = M::shuffle(&seat);
                        let (log, options, stop) = (&log, &options(), &Stop::default());
                        let writing = Writing { reservation, folder, log, options, reporter: &Silent, stop };
                        exchange.run(rank, shuffle, writing).unwrap();
                        // Who is dropped sooner has failed.
                        rank.barrier().unwrap();
                        if let Some(counted) = M::counted(&seat) {
                            let Load { sent, received, .. } = exchange.loads()[rank.rank() as usize];
                            assert_eq!(counted, (sent, received), "what goes over the wire is what is planned");
                        }
                        exchange.dry_run(&Stop::default()).unwrap().1
                    })
                })
                .collect();
            let loads: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            assert!(loads.iter().all(|other| *other == loads[0]), "all make the same plan");
            (self.written(&folder), loads[0].clone())
        })
    }

    /// Dealt out, as [`deal`], and seen as `wish` says: what every property of exchanges has.
    pub(crate) fn parties(&self, ranks: u32, cuts: &[u64], wish: Option<u64>) -> (Parties, Vec<Extents>) {
        let sight = wish.map_or(Sight::Shared, |wish| seen(self.files.ids().count(), ranks, wish));
        let parties = Parties { sight, nodes: (0..ranks).map(|rank| rank / 2).collect(), counting: Counting::Any };
        (parties, deal(&self.reservation, cuts, ranks))
    }

    /// Bytes of the source that are needed for what is to be done, and that no file holds which is seen.
    fn lacking(&self, todo: &Extents, sees: &dyn Fn(FileId) -> bool) -> u64 {
        let lacking = self.reservation.tensors.iter().map(|tensor| {
            let source = self.catalog.tensor(tensor.source);
            let (shape, itemsize) = (&source.shape, tensor.dtype().itemsize());
            let mut needed = HashSet::new();
            for (index, chunk) in tensor.entry.chunks.iter().enumerate() {
                let Some((file, offset)) = tensor.place(index) else { continue };
                for (local, element) in (0..).zip(linear_indices(shape, &chunk.tile)) {
                    let at = offset + local * itemsize;
                    if todo.overlaps(file, &(at..at + itemsize)) {
                        needed.insert(element);
                    }
                }
            }
            let mut lacking = 0;
            let summands = source.summands.as_ref();
            for summand in 0..summands.map_or(1, |of| of.reduction.count()) {
                let mut lacked = needed.clone();
                for (index, chunk) in source.chunks.iter().enumerate() {
                    let is_of_it = summands.is_none_or(|of| of.of_chunk[index] == summand);
                    if is_of_it && chunk.place.file().is_some_and(sees) {
                        for element in linear_indices(shape, &chunk.tile) {
                            lacked.remove(&element);
                        }
                    }
                }
                lacking += lacked.len() as u64 * source.dtype.itemsize();
            }
            lacking
        });
        lacking.sum()
    }

    /// Bytes that go over the wire at most: each summand once, and what they become to each other rank.
    fn at_most(&self, todos: &[Extents]) -> u64 {
        let of_tensor = |tensor: &Reserved| {
            let source = self.catalog.tensor(tensor.source);
            let whole = source.summands.as_ref().map(|summands| summands.reduction.whole());
            let itemsize = tensor.dtype().itemsize();
            // By tile, share and element.
            let mut ranks: HashMap<(Tile, Option<&Share>, u64), HashSet<usize>> = HashMap::new();
            for (index, chunk) in tensor.entry.chunks.iter().enumerate() {
                let Some((file, offset)) = tensor.place(index) else { continue };
                let share = tensor.shares.get(index).map(Arc::as_ref).or(whole.as_ref());
                for element in 0..chunk.tile.numel() {
                    let at = offset + element * itemsize;
                    let needers = ranks.entry((chunk.tile.clone(), share, element)).or_default();
                    needers.extend((0..todos.len()).filter(|rank| todos[*rank].overlaps(file, &(at..at + itemsize))));
                }
            }
            let most = ranks.iter().filter(|(_, needers)| !needers.is_empty()).map(|((_, share, _), needers)| {
                let summands = share.map_or(1, |share| share.summands.len());
                if summands > 1 { summands + needers.len() - 1 } else { needers.len() }
            });
            most.sum::<usize>() as u64 * source.dtype.itemsize()
        };
        self.reservation.tensors.iter().map(of_tensor).sum()
    }

    fn written(&self, folder: &Path) -> Vec<Vec<u8>> {
        self.reservation.files.iter().map(|file| fs::read(folder.join(&file.path)).unwrap()).collect()
    }
}

fn options() -> Options {
    Options { threads: 2, strip_bytes: 1000, sync: false }
}

/// The output files, cut at these places, dealt out in turn.
fn deal(reservation: &Reservation, cuts: &[u64], ranks: u32) -> Vec<Extents> {
    let mut todos = vec![Extents::new(); ranks as usize];
    for (file, output) in (0..).zip(&reservation.files) {
        let mut ends: Vec<u64> = cuts.iter().map(|cut| cut % (output.len + 1)).chain([output.len]).collect();
        ends.sort_unstable();
        let mut start = 0;
        for (nth, end) in ends.into_iter().enumerate() {
            todos[(nth + file as usize) % ranks as usize].insert(file, start..end);
            start = end;
        }
    }
    todos
}

impl Exchange<'_> {
    /// What each rank has in all rounds.
    fn loads(&self) -> Vec<Load> {
        let Self { input, reservation, parties, owners, bucket_bytes } = *self;
        let rounds = Rounds::new(input.catalog, &reservation.tensors, owners, parties, bucket_bytes);
        let drafts = rounds.flat_map(|round| round.unwrap().drafts);
        drafts.fold(vec![Load::default(); parties.nodes.len()], |sums, draft| {
            sums.into_iter().zip(draft.loads).map(|(sum, load)| sum.plus(load)).collect()
        })
    }
}

/// An element of a summand: four of them add up to what the dtype holds.
fn term(dtype: Dtype, index: u64, summand: u64) -> Vec<u8> {
    let number = u8::try_from((index * (summand + 1) + 5 * summand) % 63).unwrap();
    let float = (f32::from(number) * 0.37 - 9.0).to_le_bytes();
    match dtype {
        Dtype::F32 => float.to_vec(),
        Dtype::Bf16 => float[2..].to_vec(),
        _ => element(u64::from(number), dtype.itemsize())
            .into_iter()
            .enumerate()
            .map(|(at, byte)| if at == 0 { byte } else { 0 })
            .collect(),
    }
}

pub(crate) fn spec() -> impl Strategy<Value = Spec> {
    let dtypes = prop::sample::select(vec![
        (Dtype::U8, Dtype::U8),
        (Dtype::Bf16, Dtype::Bf16),
        (Dtype::I64, Dtype::I64),
        (Dtype::F32, Dtype::Bf16),
    ]);
    prop::collection::vec(0..9_u64, 0..4).prop_flat_map(move |shape| {
        let ndim = shape.len();
        dtypes.clone().prop_flat_map(move |dtypes| {
            let summands = prop_oneof![1 => Just(None), 1 => (1..5_u64, op(dtypes.0)).prop_map(Some)];
            (Just(shape.clone()), Just(dtypes), layout(ndim), layout(ndim), summands)
        })
    })
}

/// One that has a value, whatever the summands.
fn op(dtype: Dtype) -> impl Strategy<Value = ReduceOp> {
    use ReduceOp::{Avg, Band, Bor, Bxor, Max, Min, Product, Sum};
    prop::sample::select(match dtype {
        Dtype::U8 => vec![Sum, Max, Min, Band, Bor, Bxor],
        Dtype::I64 => vec![Sum, Product, Max, Min, Band, Bor, Bxor],
        _ => vec![Sum, Avg, Product, Max, Min],
    })
}

/// Whether its lengths can be told.
pub(crate) fn fits((shape, (from, to), ..): &Spec) -> bool {
    checked_len_bytes(shape, *from).is_some() && checked_len_bytes(shape, *to).is_some()
}

/// Which ranks see which files: each is seen by some.
fn seen(files: usize, ranks: u32, wish: u64) -> Sight {
    let of_file = |file: usize| {
        let bits = wish.rotate_left(u32::try_from(file % 64).unwrap() * 7);
        let mut seen: smallvec::SmallVec<[u32; 2]> =
            (0..ranks).filter(|rank| (bits >> (rank * 5)).trailing_zeros() > 2).collect();
        if seen.is_empty() {
            seen.push(u32::try_from(file).unwrap() % ranks);
        }
        seen
    };
    Sight::PerRank((0..files).map(of_file).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(250))]

    #[test]
    fn ranks_together_write_what_one_process_writes(
        specs in prop::collection::vec(spec(), 1..4),
        transpose in any::<bool>(),
        shares in any::<bool>(),
        ranks in 1..6_u32,
        cuts in prop::collection::vec(any::<u64>(), 0..4),
        bucket_bytes in prop_oneof![Just(1_u64), 16..400_u64, Just(1 << 20)],
        wish in prop::option::of(any::<u64>()),
    ) {
        prop_assume!(specs.iter().all(fits));
        let case = Case::new(&specs, transpose);
        let case = if shares { case.with_shares() } else { case };
        let (parties, todos) = case.parties(ranks, &cuts, wish);
        let (together, loads) = case.together(&Host, &parties, &todos, bucket_bytes);
        prop_assert!(together == case.alone());
        let of_all = |of: fn(&Load) -> u64| loads.iter().map(of).sum::<u64>();
        let received = of_all(|load| load.received);
        prop_assert!(of_all(|load| load.sent) <= received && received <= case.at_most(&todos));
        if shares || case.catalog.tensors.iter().any(|entry| entry.summands.is_some()) {
            return Ok(());
        }
        let stored = case.catalog.tensors.iter().map(|entry| {
            entry.numel() * entry.dtype.itemsize() * entry.summands.as_ref().map_or(1, |of| of.reduction.count())
        });
        match &parties.sight {
            // Every byte is read once, whoever reads it.
            Sight::Shared => prop_assert_eq!(loads.iter().map(|load| load.read).sum::<u64>(), stored.sum::<u64>()),
            // Nobody gets what it has, nor anything twice.
            Sight::PerRank(seen) => for (rank, (todo, load)) in (0..).zip(todos.iter().zip(&loads)) {
                prop_assert_eq!(load.received, case.lacking(todo, &|FileId(file)| seen[file as usize].contains(&rank)));
            },
        }
    }
}

/// Rows of one rank each, of tensors that take several rounds, and of small ones between them.
#[test]
fn tensors_are_through_one_after_the_other() {
    let rows = |ranks| Layout { mesh: vec![ranks], placements: vec![Placement::Shard(TensorDim(0))] };
    let tensor = |rows_of: u64| (vec![rows_of, 8], (Dtype::F32, Dtype::F32), rows(2), rows(3), None);
    let case = Case::new(&[tensor(64), tensor(64), tensor(2), tensor(2), tensor(64)], false);
    let todos = deal(&case.reservation, &[], 2);
    let owners = Owners::new(&case.reservation.files, &todos);
    let parties = Parties { sight: Sight::Shared, nodes: vec![0, 0], counting: Counting::Any };
    let rounds = Rounds::new(&case.catalog, &case.reservation.tensors, &owners, &parties, 300);
    let rounds: Vec<(Vec<usize>, bool)> = rounds
        .map(|round| {
            let round = round.unwrap();
            (round.drafts.iter().map(|draft| draft.unit.number).collect(), round.ends_whole)
        })
        .collect();
    let ends: Vec<&Vec<usize>> = rounds.iter().filter(|(_, ends)| *ends).map(|(numbers, _)| numbers).collect();
    assert!(ends.iter().all(|numbers| !numbers.is_empty()));
    let through: Vec<usize> = ends.iter().filter_map(|numbers| numbers.last()).copied().collect();
    assert_eq!(through, [0, 1, 3, 4]);
    assert!(rounds.len() > 8, "{rounds:?}");
}

/// Bytes over the wire of an evenly cut tensor of 64 KiB: each rank sees a file of its own, and writes one.
fn wire(from: Layout, to: Layout, summands: Option<(u64, ReduceOp)>, ranks: u32, bucket_bytes: u64) -> Vec<(u64, u64)> {
    let case = Case::new(&[(vec![64, 256], (Dtype::F32, Dtype::F32), from, to, summands)], false);
    assert_eq!((case.files.ids().count(), case.reservation.files.len()), (ranks as usize, ranks as usize));
    let seen = (0..ranks).map(|rank| std::iter::once(rank).collect()).collect();
    let parties = Parties { sight: Sight::PerRank(seen), nodes: vec![0; ranks as usize], counting: Counting::Any };
    let todos = deal(&case.reservation, &[], ranks);
    let (together, loads) = case.together(&Host, &parties, &todos, bucket_bytes);
    assert!(together == case.alone());
    let mut wire: Vec<(u64, u64)> = loads.iter().map(|load| (load.sent, load.received)).collect();
    wire.sort_unstable();
    wire
}

/// All of the tensor, in bytes.
const WHOLE: u64 = 64 << 10;

fn placed(mesh: &[u64], placements: &[Placement]) -> Layout {
    Layout { mesh: mesh.to_vec(), placements: placements.to_vec() }
}

#[test]
fn what_all_need_is_sent_once() {
    use Placement::{Replicate, Shard};
    let (from, to) = (placed(&[4], &[Shard(TensorDim(0))]), placed(&[4], &[Replicate]));
    for bucket_bytes in [3000, 1 << 20] {
        let each = (WHOLE / 4, WHOLE / 4 * 3);
        assert_eq!(wire(from.clone(), to.clone(), None, 4, bucket_bytes), [each; 4]);
    }
}

#[test]
fn summands_go_to_who_makes_the_value() {
    use Placement::{Replicate, Shard};
    let summands = Some((4, ReduceOp::Sum));
    let one = placed(&[1], &[Replicate]);
    for bucket_bytes in [3000, 40 << 10] {
        // All but its own part of its summand, and the value of that once; the same parts of the others' summands, and the
        // other parts of the value.
        let each = (WHOLE, WHOLE / 2 * 3);
        assert_eq!(wire(one.clone(), placed(&[4], &[Replicate]), summands, 4, bucket_bytes), [each; 4]);
        let each = (WHOLE / 4 * 3, WHOLE / 4 * 3);
        let rows = placed(&[4], &[Shard(TensorDim(0))]);
        assert_eq!(wire(one.clone(), rows, summands, 4, bucket_bytes), [each; 4]);
    }
    // Two summands of each half, which two ranks need: half of a half goes each way, twice.
    let halves = || placed(&[2], &[Shard(TensorDim(0))]);
    let replicas = placed(&[2, 2], &[Shard(TensorDim(0)), Replicate]);
    let each = (WHOLE / 2, WHOLE / 2);
    assert_eq!(wire(halves(), replicas, Some((2, ReduceOp::Max)), 4, 3000), [each; 4]);
}

#[test]
fn buffers_are_no_longer_than_the_bucket() {
    use Placement::{Replicate, Shard};
    let rows = placed(&[3], &[Shard(TensorDim(0))]);
    let one = placed(&[1], &[Replicate]);
    let specs = [(rows.clone(), None), (one, Some((3, ReduceOp::Sum)))]
        .map(|(from, summands)| (vec![60, 60], (Dtype::F32, Dtype::F32), from, placed(&[3], &[Replicate]), summands));
    let case = Case::new(&specs, false);
    let (parties, todos) = case.parties(3, &[], Some(1));
    let owners = Owners::new(&case.reservation.files, &todos);
    let rounds = Rounds::new(&case.catalog, &case.reservation.tensors, &owners, &parties, 2000);
    for round in rounds {
        let round = round.unwrap();
        for rank in 0..3 {
            let moves = Moves::new(&round, rank);
            // Places are aligned.
            let most = 2000 + 16 * (moves.arriving.len() + moves.reads.len() + 1);
            let (outgoing, incoming) = moves.wire_lens();
            let longest = moves.stage_len.max(outgoing).max(incoming).max(moves.unpacked_len);
            assert!(longest <= most, "{longest} of {most}");
        }
    }
}
