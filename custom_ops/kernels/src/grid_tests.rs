//! Grids that threads share, and what their doors refuse.

use super::*;

#[test]
fn tiles_cover_the_matrix_once() {
    let (mut data, mut claims, mut bounds) = (vec![0; 7 * 10], Claims::default(), Vec::new());
    cut(&mut bounds, 7, 3);
    assert_eq!(bounds, [0, 3, 6, 7]);
    let grid = Grid::new(&mut data, Layout { stride: 10, columns: 10, tile_columns: 4 }, &bounds, &mut claims);
    std::thread::scope(|scope| {
        for _ in 0..if cfg!(miri) { 3 } else { 8 } {
            scope.spawn(|| {
                for index in 0..grid.len() {
                    let Some(mut tile) = grid.tile(index) else { continue };
                    for row in 0..tile.rows() {
                        let first = (tile.first_row() + row) * 10 + tile.first_column();
                        tile.row(row).iter_mut().zip(first..).for_each(|(value, wanted)| *value += wanted);
                    }
                }
            });
        }
    });
    assert_eq!(data, (0..70).collect::<Vec<_>>());
}

#[test]
fn a_tile_is_handed_out_once() {
    let (mut data, mut claims) = ([0; 6], Claims::default());
    let grid = Grid::new(&mut data, Layout::whole(3), &[0, 2], &mut claims);
    assert!(grid.tile(0).is_some());
    assert!(grid.tile(0).is_none());
}

#[test]
fn a_matrix_is_whole_once_its_tiles_are_back() {
    let (mut data, mut claims) = ([0; 7], Claims::default());
    let grid = Grid::new(&mut data, Layout::whole(2), &[0, 1, 2, 3], &mut claims);
    let mut first = grid.tile(0).unwrap();
    grid.tile(2).unwrap().row(0).fill(2);
    assert!(grid.tile(2).is_none() && grid.finished().is_none());
    let last = grid.tile(1);
    assert!(grid.finished().is_none());
    drop(last);
    first.row(0).fill(1);
    assert!(grid.finished().is_none());
    drop(first);
    assert_eq!(grid.finished(), Some(&[1, 1, 0, 0, 2, 2, 0][..]));
    assert!(Grid::new(&mut data, Layout::whole(2), &[0, 3], &mut claims).finished().is_none());
}

#[test]
fn rows_can_be_read_once_their_tiles_are_back() {
    let (mut data, mut claims, mut bounds) = (vec![0; 2 * 70], Claims::default(), Vec::new());
    cut(&mut bounds, 70, 1);
    let grid = Grid::new(&mut data, Layout::whole(2), &bounds, &mut claims);
    assert_eq!(grid.finished_rows(3..3), Some(&[][..]));
    let [mut first, last] = [63, 64].map(|index| grid.tile(index).unwrap());
    first.row(0).fill(1);
    drop(first);
    assert_eq!(grid.finished_rows(63..64), Some(&[1, 1][..]));
    assert!(grid.finished_rows(63..65).is_none() && grid.finished_rows(62..64).is_none());
    drop(last);
    assert_eq!(grid.finished_rows(63..65), Some(&[1, 1, 0, 0][..]));
    assert!(grid.finished().is_none());
}

#[test]
fn rows_with_gaps_or_of_no_tile_cannot_be_read() {
    let refused = |layout: Layout, last: usize, tiles: Range<usize>| {
        let read = move || {
            let (mut data, mut claims, bounds) = ([0; 12], Claims::default(), [0, 1, last]);
            let grid = Grid::new(&mut data, layout, &bounds, &mut claims);
            (0..grid.len()).for_each(|index| drop(grid.tile(index)));
            assert_eq!(grid.finished_rows(tiles).map(<[_]>::len), Some(4 * last));
        };
        std::panic::catch_unwind(read).is_err()
    };
    assert!(!refused(Layout::whole(4), 2, 0..2) && !refused(Layout::whole(4), 3, 0..2));
    assert!(refused(Layout::whole(4), 4, 0..2) && refused(Layout::whole(4), usize::MAX, 0..2));
    assert!(refused(Layout::whole(4), 2, 0..3));
    assert!(refused(Layout { stride: 5, columns: 4, tile_columns: 4 }, 2, 0..2));
    assert!(refused(Layout { stride: 4, columns: 4, tile_columns: 2 }, 2, 0..2));
}

#[test]
fn a_thread_reads_what_others_wrote_before_it_was_whole() {
    let (mut data, mut claims, mut bounds) = (vec![0; 64], Claims::default(), Vec::new());
    cut(&mut bounds, 64, 1);
    let grid = Grid::new(&mut data, Layout::whole(1), &bounds, &mut claims);
    let written = || {
        (0..grid.len()).filter_map(|index| grid.tile(index)).for_each(|mut tile| {
            let row = tile.first_row();
            tile.row(0)[0] = row;
        });
        loop {
            match grid.finished() {
                Some(data) => break data,
                None => std::thread::yield_now(),
            }
        }
    };
    let expected: Vec<_> = (0..64).collect();
    std::thread::scope(|scope| {
        let threads = [(); 3].map(|()| scope.spawn(written));
        threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), expected));
    });
}

#[test]
#[should_panic(expected = "row past the matrix")]
fn a_row_past_the_matrix_is_refused() {
    let (mut data, mut claims) = ([0; 5], Claims::default());
    let grid = Grid::new(&mut data, Layout::whole(3), &[0, 2], &mut claims);
    grid.tile(0).unwrap().row(1);
}

#[test]
fn rows_in_line_are_those_of_the_tile() {
    let (mut data, mut claims) = ((0..15).collect::<Vec<_>>(), Claims::default());
    let grid = Grid::new(&mut data, Layout::whole(3), &[0, 1, 4, 5], &mut claims);
    let mut tile = grid.tile(1).unwrap();
    assert_eq!(tile.rows_in_line(1..3), [6, 7, 8, 9, 10, 11]);
    assert!(tile.rows_in_line(3..3).is_empty());
    tile.rows_in_line(0..1).fill(0);
    drop(tile);
    assert_eq!(data[..7], [0, 1, 2, 0, 0, 0, 6]);
}

#[test]
fn rows_that_are_not_in_line_are_refused() {
    let refused = |layout: Layout, rows: Range<usize>| {
        let start = move || {
            let (mut data, mut claims) = ([0; 12], Claims::default());
            let grid = Grid::new(&mut data, layout, &[0, 3], &mut claims);
            grid.tile(0).unwrap().rows_in_line(rows);
        };
        std::panic::catch_unwind(start).is_err()
    };
    assert!(!refused(Layout::whole(4), 0..3));
    assert!(refused(Layout::whole(4), 0..4));
    assert!(refused(Layout::whole(5), 0..3));
    assert!(refused(Layout { stride: 4, columns: 3, tile_columns: 3 }, 0..1));
    assert!(refused(Layout { stride: 4, columns: 4, tile_columns: 2 }, 0..1));
}

#[test]
fn scattered_rows_go_where_they_belong() {
    let (mut data, mut claims, mut order) = ([0; 4 * 3], Claims::default(), Distinct::default());
    order.fill(3, [0, 2, 3].into_iter(), |number| [2, 9, 0, 1][number]);
    assert_eq!(order.numbers(), [2, 3, 0]);
    let layout = Layout { stride: 3, columns: 2, tile_columns: 2 };
    let grid = Grid::scattered(&mut data, layout, &order, &[0, 1, 3], &mut claims);
    for index in 0..2 {
        let mut tile = grid.tile(index).unwrap();
        for row in 0..tile.rows() {
            let value = 1 + tile.first_row() + row;
            tile.row(row).fill(value);
        }
    }
    assert_eq!(data, [3, 3, 0, 0, 0, 0, 1, 1, 0, 2, 2, 0]);
}

#[test]
fn starts_are_those_of_the_rows() {
    let (mut data, mut claims, mut order) = ([0u8; 4 * 7], Claims::default(), Distinct::default());
    order.fill(4, 0..4, |number| 3 - number);
    let layout = Layout { stride: 7, columns: 5, tile_columns: 3 };
    let grid = Grid::scattered(&mut data, layout, &order, &[1, 4], &mut claims);
    for index in 0..2 {
        let mut tile = grid.tile(index).unwrap();
        let mut starts = [std::ptr::null_mut(); 3];
        tile.starts(&[2, 0, 1], 1, &mut starts);
        let wanted = [2, 0, 1].map(|row| tile.row(row)[1..].as_mut_ptr());
        assert_eq!(starts, wanted);
    }
}

#[test]
fn starts_outside_are_refused() {
    let refused = |len: usize, rows: &[usize], column: usize| {
        let (mut data, rows) = (vec![0u8; len], rows.to_vec());
        let start = move || {
            let mut claims = Claims::default();
            let layout = Layout { stride: 4, columns: 3, tile_columns: 3 };
            let grid = Grid::new(&mut data, layout, &[0, 3, 6], &mut claims);
            grid.tile(0).unwrap().starts(&rows, column, &mut [std::ptr::null_mut(); 2]);
        };
        std::panic::catch_unwind(start).is_err()
    };
    assert!(!refused(11, &[2, 0], 3));
    for (len, rows, column) in [(10, [2, 0], 0), (2, [0, 0], 0), (24, [3, 0], 0), (24, [0, 1], 4)] {
        assert!(refused(len, &rows, column), "{len} {rows:?} {column}");
    }
    assert!(refused(24, &[0, 1, 2], 0));
}

#[test]
#[should_panic(expected = "row past the matrix")]
fn starts_of_columns_past_the_matrix_are_refused() {
    let (mut data, mut claims) = ([0u8; 4], Claims::default());
    let grid = Grid::new(&mut data, Layout { stride: 5, columns: 5, tile_columns: 3 }, &[0, 1], &mut claims);
    grid.tile(1).unwrap().starts(&[0], 0, &mut [std::ptr::null_mut()]);
}

#[test]
#[should_panic(expected = "two rows in one place")]
fn a_place_taken_twice_is_refused() {
    Distinct::default().fill(2, 0..2, |_| 1);
}

#[test]
#[should_panic(expected = "row of a tile")]
fn a_row_past_the_tile_is_refused() {
    Tile::dense(&mut [0; 6], 3).row(2);
}
