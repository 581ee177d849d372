//! Numbers of a receipt as people read them.

/// Frequencies from the lowest to the highest; one number where they are the same.
pub(super) fn clock([low, high]: [f64; 2]) -> String {
    let [low, high] = [low, high].map(|mhz| format!("{mhz:.0}"));
    if low == high { format!("{low} MHz") } else { format!("{low} to {high} MHz") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_frequency_is_one_number() {
        assert_eq!(clock([2_100.0, 2_100.2]), "2100 MHz");
        assert_eq!(clock([800.0, 2_100.0]), "800 to 2100 MHz");
    }
}
