//! Numbers of a receipt as people read them.

const DAY: u64 = 86_400;

/// Seconds since 1970 as date and time in UTC, by ISO 8601.
pub(super) fn utc(seconds: u64) -> String {
    // Years begin in March here, so that the day of a leap year is their last, and start in the year 0.
    let days = seconds / DAY + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let (year, time) = (era * 400 + year + next, seconds % DAY);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", time / 3600, time / 60 % 60, time % 60)
}

/// Frequencies from the lowest to the highest; one number where they are the same.
pub(super) fn clock([low, high]: [f64; 2]) -> String {
    let [low, high] = [low, high].map(|mhz| format!("{mhz:.0}"));
    if low == high { format!("{low} MHz") } else { format!("{low} to {high} MHz") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_767_225_599, "2025-12-31T23:59:59Z"),
            (1_795_939_746, "2026-11-29T08:09:06Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), expected);
        }
    }

    #[test]
    fn one_frequency_is_one_number() {
        assert_eq!(clock([2_100.0, 2_100.2]), "2100 MHz");
        assert_eq!(clock([800.0, 2_100.0]), "800 to 2100 MHz");
    }
}
