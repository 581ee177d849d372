//! What a panic says, for all that keep panics from their callers.

use std::any::Any;

/// The text of a panic that was caught.
///
/// A payload without one is leaked: dropping a value of unknown type could panic again.
pub fn panic_text(payload: Box<dyn Any + Send>) -> String {
    let payload = match payload.downcast::<String>() {
        Ok(text) => return *text,
        Err(payload) => payload,
    };
    match payload.downcast::<&str>() {
        Ok(text) => String::from(*text),
        Err(payload) => {
            std::mem::forget(payload);
            String::from("panic without a text")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{catch_unwind, panic_any};

    use super::*;

    struct Bomb;

    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }

    fn caught(body: fn()) -> String {
        panic_text(catch_unwind(body).expect_err("no panic"))
    }

    #[test]
    fn every_kind_of_panic_has_a_text() {
        assert_eq!(caught(|| panic!("plain")), "plain");
        assert_eq!(caught(|| panic!("number {}", 7)), "number 7");
        assert_eq!(caught(|| panic_any(Bomb)), "panic without a text");
    }
}
