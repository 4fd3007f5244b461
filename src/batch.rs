//! Work in portions: so much at a time that memory is bounded and nobody waits long.

/// Takes items from the front until they have `least_bytes` bytes, or are `most` in number, or all; returns
/// them and the rest. At least one item is taken where there is one.
pub fn split_batch<T>(
    items: &[T],
    most: usize,
    least_bytes: u64,
    mut length_bytes: impl FnMut(&T) -> u64,
) -> (&[T], &[T]) {
    let mut taken_bytes: u64 = 0;
    let count = items
        .iter()
        .take(most)
        .take_while(|item| {
            let fits = taken_bytes < least_bytes;
            taken_bytes = taken_bytes.saturating_add(length_bytes(item));
            fits
        })
        .count();
    items.split_at(count)
}

#[cfg(test)]
mod tests {
    use super::split_batch;

    #[test]
    fn a_batch_ends_with_the_item_that_fills_it() {
        let split = |items: &[u64], most, least_bytes| {
            let (batch, rest) = split_batch(items, most, least_bytes, |&length| length);
            (batch.to_vec(), rest.to_vec())
        };
        assert_eq!(split(&[4, 4, 4], 9, 8), (vec![4, 4], vec![4]));
        assert_eq!(split(&[4, 5, 4], 9, 8), (vec![4, 5], vec![4]));
        assert_eq!(split(&[100, 1], 9, 8), (vec![100], vec![1]));
        assert_eq!(split(&[0, 0, 0], 2, 8), (vec![0, 0], vec![0]));
        assert_eq!(split(&[1], 9, 8), (vec![1], vec![]));
        assert_eq!(split(&[], 9, 8), (vec![], vec![]));
    }
}
