//! Compares layouts with a reference that uses no intervals: explicit lists of indices for each dim, and a count of
//! holders for each element. The reference is slow and simple, and follows PyTorch's definitions only.

#![allow(clippy::cast_possible_truncation, reason = "test sizes are small")]

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

/// Returns piece `r` of a list that is split into `k` pieces like `torch.chunk`: the first pieces have `ceil(len / k)`
/// elements, and the last pieces may be shorter or empty.
fn chunk_of(list: &[u64], k: u64, r: u64) -> Vec<u64> {
    let size = (list.len() as u64).div_ceil(k).max(1);
    list.chunks(size as usize).nth(r as usize).unwrap_or_default().to_vec()
}

fn index_lists(shape: &[u64], mesh: &[u64], placements: &[Placement], at: &[u64]) -> Vec<Vec<u64>> {
    let mut lists: Vec<Vec<u64>> = shape.iter().map(|&n| (0..n).collect()).collect();
    for ((placement, &k), &r) in placements.iter().zip(mesh).zip(at) {
        match *placement {
            Placement::Shard(dim) => lists[dim.0] = chunk_of(&lists[dim.0], k, r),
            Placement::StridedShard { dim, split_factor } => {
                let list = lists[dim.0].clone();
                let blocks = (0..split_factor).map(|block| chunk_of(&list, split_factor, block));
                lists[dim.0] = blocks.flat_map(|block| chunk_of(&block, k, r)).collect();
            }
            Placement::Replicate | Placement::Partial(_) => {}
        }
    }
    lists
}

/// Returns the linear indices of a product of index lists, row-major.
fn product(lists: &[Vec<u64>], shape: &[u64]) -> Vec<u64> {
    let mut linear = vec![0];
    for (list, &n) in lists.iter().zip(shape) {
        linear = linear.iter().flat_map(|row| list.iter().map(move |at| row * n + at)).collect();
    }
    linear
}

fn lists_of(tile: &Tile) -> Vec<Vec<u64>> {
    tile.dims().iter().map(|dim| dim.iter().flatten().collect()).collect()
}

fn elements(tile: &Tile, shape: &[u64]) -> Vec<u64> {
    product(&lists_of(tile), shape)
}

fn elements_of(region: &Region, shape: &[u64]) -> Vec<u64> {
    elements(&Tile::from_region(region), shape)
}

/// Returns the number of tiles that hold each element.
fn holders(shape: &[u64], tiles: &[Tile]) -> Vec<usize> {
    let mut holders = vec![0; numel(shape).unwrap() as usize];
    for element in tiles.iter().flat_map(|tile| elements(tile, shape)) {
        holders[element as usize] += 1;
    }
    holders
}

/// Asserts that `Cover::prove` gives the result that follows from the number of tiles that hold each element.
fn check_verdict(shape: &[u64], tiles: &[Tile]) -> Result<(), TestCaseError> {
    let holders = holders(shape, tiles);
    match Cover::prove(shape, tiles) {
        Ok(_) => prop_assert!(holders.iter().all(|&count| count == 1)),
        Err(CoverError::Overlap { first, second, region }) => {
            prop_assert!(first < second && !region.is_empty());
            for tile in [&tiles[first], &tiles[second]] {
                let held: HashSet<u64> = elements(tile, shape).into_iter().collect();
                prop_assert!(elements_of(&region, shape).iter().all(|element| held.contains(element)));
            }
        }
        Err(CoverError::Gap { region }) => {
            prop_assert!(holders.iter().all(|&count| count <= 1));
            let hole = elements_of(&region, shape);
            prop_assert_eq!(hole.first().copied(), holders.iter().position(|&count| count == 0).map(|at| at as u64));
            prop_assert!(hole.iter().all(|&element| holders[element as usize] == 0));
        }
        Err(other) => prop_assert!(false, "{other}"),
    }
    Ok(())
}

fn check_lookup(shape: &[u64], tiles: &[Tile], target: &Tile) -> Result<(), TestCaseError> {
    let target_elements: HashSet<u64> = elements(target, shape).into_iter().collect();
    let meets = |tile: &Tile| elements(tile, shape).iter().any(|element| target_elements.contains(element));
    let naive: Vec<usize> = (0..tiles.len()).filter(|&index| meets(&tiles[index])).collect();
    let cover = Cover::prove(shape, tiles).unwrap();
    prop_assert_eq!(cover.overlapping(target).collect::<Vec<_>>(), naive);
    Ok(())
}

#[derive(Clone, Debug)]
struct Layout {
    mesh: Vec<u64>,
    placements: Vec<Placement>,
}

impl Layout {
    /// Returns the distinct tiles of all coordinates.
    fn tiles(&self, shape: &[u64]) -> Vec<Tile> {
        let mut seen = HashSet::new();
        let tiles = (0..self.mesh.iter().product())
            .map(|rank| local_shard(shape, &self.mesh, &self.placements, &unravel(rank, &self.mesh)).unwrap());
        tiles.filter(|tile| seen.insert(tile.clone())).collect()
    }
}

fn shapes() -> impl Strategy<Value = Vec<u64>> {
    // With many dims, frequent sizes of 0 would make nearly every tensor empty.
    prop::collection::vec(prop_oneof![1 => 0..=1_u64, 9 => 1..=9_u64], 0..=4)
}

fn placements(ndim: usize) -> BoxedStrategy<Placement> {
    let whole = prop_oneof![Just(Placement::Replicate), Just(Placement::Partial(ReduceOp::Sum))];
    if ndim == 0 {
        return whole.boxed();
    }
    // Prefer the first dim, so that several mesh dims shard one tensor dim.
    let dim = prop_oneof![Just(0), 0..ndim].prop_map(TensorDim);
    prop_oneof![
        1 => whole,
        3 => dim.clone().prop_map(Placement::Shard),
        4 => (dim, 1..=6_u64).prop_map(|(dim, split_factor)| Placement::StridedShard { dim, split_factor }),
    ]
    .boxed()
}

fn layouts(ndim: usize) -> impl Strategy<Value = Layout> {
    prop::collection::vec((1..=4_u64, placements(ndim)), 1..=3).prop_map(|dims| {
        let (mesh, placements) = dims.into_iter().unzip();
        Layout { mesh, placements }
    })
}

fn sharded() -> impl Strategy<Value = (Vec<u64>, Layout, Layout)> {
    shapes().prop_flat_map(|shape| {
        let ndim = shape.len();
        (Just(shape), layouts(ndim), layouts(ndim))
    })
}

/// Generates a shape and boxes that tile a tensor of this shape. The tensor is split repeatedly in random order, so the
/// boxes are rarely a grid.
fn cut_up() -> impl Strategy<Value = (Vec<u64>, Vec<Tile>)> {
    let cuts = prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..9_u64), 0..12);
    (prop::collection::vec(1..=7_u64, 1..=3), cuts).prop_map(|(shape, cuts)| {
        let mut boxes = vec![Region::whole(&shape)];
        for (which, dim, at) in cuts {
            let region = boxes.swap_remove(which.index(boxes.len()));
            let dim = dim.index(shape.len());
            let at = at % region.sizes[dim].max(1);
            let (mut low, mut high) = (region.clone(), region);
            low.sizes[dim] = at;
            high.offsets[dim] += at;
            high.sizes[dim] -= at;
            boxes.extend([high, low]);
        }
        (shape, boxes.iter().map(Tile::from_region).collect())
    })
}

fn boxes_within(shape: &[u64]) -> impl Strategy<Value = Region> + use<> {
    let dims: Vec<_> = shape.iter().map(|&n| (0..=n).prop_flat_map(move |at| (Just(at), 0..=n - at))).collect();
    dims.prop_map(|dims| {
        let (offsets, sizes): (Vec<u64>, Vec<u64>) = dims.into_iter().unzip();
        Region::new(offsets, sizes)
    })
}

/// Generates sets of indices that are periodic, irregular, or both.
fn sets() -> impl Strategy<Value = Vec<u64>> {
    let stretch = prop_oneof![
        prop::collection::vec(any::<bool>(), 0..12),
        (prop::collection::vec(any::<bool>(), 1..5), 1..6_usize).prop_map(|(beat, times)| beat.repeat(times)),
    ];
    prop::collection::vec(stretch, 0..4)
        .prop_map(|stretches| (0..).zip(stretches.concat()).filter_map(|(index, held)| held.then_some(index)).collect())
}

fn intervals(set: &[u64]) -> Intervals {
    set.iter().map(|&index| index..index + 1).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn local_shards_equal_index_lists((shape, layout, _) in sharded()) {
        for rank in 0..layout.mesh.iter().product() {
            let at = unravel(rank, &layout.mesh);
            let tile = local_shard(&shape, &layout.mesh, &layout.placements, &at).unwrap();
            prop_assert_eq!(lists_of(&tile), index_lists(&shape, &layout.mesh, &layout.placements, &at));
        }
    }

    #[test]
    fn every_layout_covers_its_tensor((shape, layout, other) in sharded(), which: prop::sample::Index) {
        let tiles = layout.tiles(&shape);
        prop_assert!(Cover::prove(&shape, &tiles).is_ok());
        for target in other.tiles(&shape) {
            check_lookup(&shape, &tiles, &target)?;
        }
        if numel(&shape) == Some(0) {
            return Ok(());
        }
        let held: Vec<Tile> = tiles.into_iter().filter(|tile| !tile.is_empty()).collect();
        let which = which.index(held.len());

        let mut fewer = held.clone();
        let removed = fewer.remove(which);
        check_verdict(&shape, &fewer)?;
        let is_gap = matches!(Cover::prove(&shape, &fewer), Err(CoverError::Gap { .. }));
        prop_assert!(is_gap);

        let mut more = held;
        more.push(removed);
        check_verdict(&shape, &more)?;
        let second = more.len() - 1;
        let is_overlap = matches!(
            Cover::prove(&shape, &more),
            Err(CoverError::Overlap { first, second: found, .. }) if (first, found) == (which, second)
        );
        prop_assert!(is_overlap);
    }

    #[test]
    fn cover_of_changed_tilings_agrees_with_counting(
        (shape, tiles) in cut_up(),
        (other, taken) in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
        change in 0..4_u8,
    ) {
        let mut tiles = tiles;
        if change & 1 != 0 {
            tiles.swap_remove(taken.index(tiles.len()));
        }
        if change & 2 != 0 && !tiles.is_empty() {
            let mut region = tiles[other.index(tiles.len())].bounds();
            region.sizes[0] = shape[0] - region.offsets[0];
            tiles.push(Tile::from_region(&region));
        }
        check_verdict(&shape, &tiles)?;
    }

    #[test]
    fn cover_of_mixed_layouts_agrees_with_counting((shape, a, b) in sharded(), mask: u32) {
        let tiles = a.tiles(&shape).into_iter().chain(b.tiles(&shape));
        let some: Vec<Tile> = tiles.enumerate().filter(|(i, _)| mask >> (i % 32) & 1 == 1).map(|(_, tile)| tile).collect();
        check_verdict(&shape, &some)?;
    }

    #[test]
    fn irregular_cover_finds_the_same_tiles_as_all_pairs(
        ((shape, tiles), region) in cut_up().prop_flat_map(|cut| { let boxes = boxes_within(&cut.0); (Just(cut), boxes) }),
    ) {
        check_lookup(&shape, &tiles, &Tile::from_region(&region))?;
        let comb = |n: u64| intervals(&(0..n).step_by(2).collect::<Vec<_>>());
        check_lookup(&shape, &tiles, &Tile::new(shape.iter().map(|&n| comb(n))))?;
    }

    #[test]
    fn cut_boxes_are_the_linear_range(shape in shapes(), a: prop::sample::Index, b: prop::sample::Index) {
        let n = numel(&shape).unwrap() as usize + 1;
        let range = a.index(n) as u64..b.index(n) as u64;
        let boxes: Vec<Region> = Region::cut(&shape, range.clone()).collect();
        prop_assert!(boxes.len() <= (2 * shape.len()).saturating_sub(1).max(1));
        prop_assert!(boxes.iter().all(|region| region.fits(&shape) && !region.is_empty()));
        let joined: Vec<u64> = boxes.iter().flat_map(|region| elements_of(region, &shape)).collect();
        prop_assert_eq!(joined, range.collect::<Vec<_>>());
    }

    #[test]
    fn regions_of_a_tile_contain_every_element((shape, layout, _) in sharded()) {
        for tile in layout.tiles(&shape) {
            let (held, sizes) = (elements(&tile, &shape), tile.sizes());
            let mut local = vec![u64::MAX; held.len()];
            for (region, at) in tile.regions() {
                let place = Region::new(at, region.sizes.clone());
                for (to, from) in elements_of(&place, &sizes).into_iter().zip(elements_of(&region, &shape)) {
                    local[to as usize] = from;
                }
            }
            prop_assert_eq!(local, held);
        }
    }

    #[test]
    fn intersection_of_regions_equals_that_of_sets((shape, (a, b)) in shapes().prop_flat_map(|shape| {
        let pair = (boxes_within(&shape), boxes_within(&shape));
        (Just(shape), pair)
    })) {
        let held: HashSet<u64> = elements_of(&b, &shape).into_iter().collect();
        let naive: Vec<u64> = elements_of(&a, &shape).into_iter().filter(|element| held.contains(element)).collect();
        let common = a.intersect(&b);
        prop_assert_eq!(common.is_none(), naive.is_empty());
        if let Some(common) = common {
            prop_assert_eq!(elements_of(&common, &shape), naive);
        }
    }

    #[test]
    fn intervals_equal_their_sets(set in sets(), cut: prop::sample::Index) {
        let list = intervals(&set);
        prop_assert_eq!(list.iter().flatten().collect::<Vec<_>>(), set.clone());
        prop_assert_eq!(list.len(), set.len() as u64);
        prop_assert_eq!(list.iter().count() as u64, list.count());
        prop_assert_eq!((list.start(), list.end()), (set.first().copied(), set.last().map(|last| last + 1)));
        // The value does not depend on how it was built.
        prop_assert_eq!(&list.iter().collect::<Intervals>(), &list);
        let (low, high) = set.split_at(cut.index(set.len() + 1));
        let mut joined = intervals(low);
        joined.concat(&intervals(high));
        prop_assert_eq!(joined, list);
    }

    #[test]
    fn slices_equal_slices_of_sets(set in sets(), a: prop::sample::Index, b: prop::sample::Index, of in sets()) {
        let list = intervals(&set);
        let (a, b) = (a.index(set.len() + 1), b.index(set.len() + 1));
        let (from, to) = (a.min(b), a.max(b));
        prop_assert_eq!(list.slice(from as u64..to as u64), intervals(&set[from..to]));
        let mut joined = list.slice(0..from as u64);
        joined.concat(&list.slice(from as u64..u64::MAX));
        prop_assert_eq!(&joined, &list);
        let of: Vec<u64> = of.into_iter().filter(|&at| at < list.len()).collect();
        let chosen: Vec<u64> = of.iter().map(|&at| set[at as usize]).collect();
        prop_assert_eq!(list.select(&intervals(&of)), intervals(&chosen));
    }

    #[test]
    fn intersections_list_every_common_index(a in sets(), b in sets()) {
        let mut naive: Vec<CommonRange> = Vec::new();
        for (left, index) in (0..).zip(&a) {
            let Ok(right) = b.binary_search(index).map(|right| right as u64) else { continue };
            match naive.last_mut() {
                Some(last) if (last.left + last.len, last.right + last.len) == (left, right) => last.len += 1,
                _ => naive.push(CommonRange { left, right, len: 1 }),
            }
        }
        prop_assert_eq!(intervals(&a).intersect(&intervals(&b)).to_vec(), naive);
        let meets = |range: &std::ops::Range<u64>| a.iter().any(|index| range.contains(index));
        prop_assert!(intervals(&b).iter().all(|range| intervals(&a).intersects(&range) == meets(&range)));
    }

    #[test]
    fn placements_round_trip(list in prop::collection::vec(placements(5), 1..5)) {
        let text = list.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let parsed = parse_placements(&text).unwrap();
        prop_assert_eq!(parsed.iter().map(ToString::to_string).collect::<Vec<_>>().join(","), text);
        prop_assert_eq!(parsed.into_iter().map(|spec| spec.resolve(5)).collect::<Option<Vec<_>>>(), Some(list));
    }

    #[test]
    fn parsers_never_panic(text in "[-sS_dhardRP(),=0-9 dptm.é]{0,24}") {
        let _ = parse_placements(&text);
        if let Ok(mesh) = DeviceMesh::parse(&text) {
            prop_assert_eq!(DeviceMesh::parse(&mesh.to_string()), Ok(mesh));
        }
    }

    /// If dims divide evenly, placements that were made from a shard order give the same tiles as splitting in that
    /// order.
    #[test]
    fn shard_order_equals_splitting_in_that_order(
        (mesh, order) in prop::collection::vec(1..=3_u64, 1..=3)
            .prop_flat_map(|mesh| { let dims: Vec<usize> = (0..mesh.len()).collect(); (Just(mesh), Just(dims).prop_shuffle()) }),
        times in 1..3_u64,
    ) {
        let n = times * mesh.iter().product::<u64>();
        let plain = vec![Placement::Shard(TensorDim(0)); mesh.len()];
        let mesh_dims = order.iter().copied().map(MeshDim).collect();
        let placements = from_shard_order(&mesh, &plain, &[(TensorDim(0), mesh_dims)]).unwrap();
        for rank in 0..mesh.iter().product() {
            let at = unravel(rank, &mesh);
            let in_order = order.iter().fold((0..n).collect::<Vec<_>>(), |list, &dim| chunk_of(&list, mesh[dim], at[dim]));
            let tile = local_shard(&[n], &mesh, &placements, &at).unwrap();
            prop_assert_eq!(lists_of(&tile), [in_order]);
        }
    }
}
