//! Keys, and the cipher against what is published and against everything that is not what was sealed.

use super::*;

const ID: &str = "00112233445566778899aabbccddeeff";

fn key() -> MasterKey {
    MasterKey::new(&std::array::from_fn::<u8, 32, _>(|index| index as u8)).unwrap()
}

#[test]
fn a_key_has_32_bytes_that_differ_and_is_never_shown() {
    for bytes in [&[][..], &[1; 31], &[1; 33], &[7; 32]] {
        let error = MasterKey::new(bytes).unwrap_err();
        assert!(matches!(&error, Error::InvalidInput { what, .. } if what == "encryption key"), "{error}");
    }
    assert_eq!(format!("{:?} {:?}", key(), RepositoryKeys::derive(&key(), ID)), "MasterKey RepositoryKeys");
}

#[test]
fn the_check_follows_from_key_and_repository() {
    let keys = RepositoryKeys::derive(&key(), ID);
    let check = keys.check();
    // The value by another implementation of BLAKE3.
    assert_eq!(check, "e29dab43fae3da9937ea825a795e8c88");
    let other = MasterKey::new(&std::array::from_fn::<u8, 32, _>(|index| 1 + index as u8)).unwrap();
    assert_ne!(RepositoryKeys::derive(&other, ID).check(), check);
    assert_ne!(RepositoryKeys::derive(&key(), &ID.replace('0', "1")).check(), check);
}

#[cfg(not(feature = "encryption"))]
#[test]
fn a_build_without_the_feature_refuses_by_name() {
    let error = RepositoryKeys::derive(&key(), ID).cipher("packs/x", &[]).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what: "encryption", .. }), "{error}");
}

#[cfg(feature = "encryption")]
mod cipher {
    use super::*;

    fn derived() -> RepositoryKeys {
        RepositoryKeys::derive(&key(), ID)
    }

    fn hex(bytes: [u8; 16]) -> String {
        format!("{:032x}", u128::from_le_bytes(bytes).swap_bytes())
    }

    /// Test case 13 of `The Galois/Counter Mode of Operation (GCM)`: a nonce of zeros is ours of
    /// page 0.
    #[test]
    fn an_empty_page_has_the_tag_that_gcm_has() {
        let tag = Cipher::new(&[0; 32]).unwrap().seal(0, false, &mut []).unwrap();
        assert_eq!(hex(tag), "530f8afbc74536b9a963b4f1c4cb738b");
    }

    /// Test case 14 there: a block of zeros.
    #[test]
    fn a_block_of_zeros_has_the_bytes_that_gcm_has() {
        let mut page = [0; 16];
        let tag = Cipher::new(&[0; 32]).unwrap().seal(0, false, &mut page).unwrap();
        assert_eq!(hex(page), "cea7403d4d606b6e074ec5d3baf39d18");
        assert_eq!(hex(tag), "d0d1c8a799996bf0265b98b5d48ab919");
    }

    #[test]
    fn a_page_opens_only_as_what_it_was_sealed_as() {
        let cipher = derived().cipher("packs/a", b"head").unwrap();
        let mut sealed = *b"a page of a pack";
        let tag = cipher.seal(7, false, &mut sealed).unwrap();
        assert_ne!(&sealed, b"a page of a pack");
        let opens = |cipher: &Cipher, number, is_last, mut page: [u8; 16], tag| {
            cipher.open(number, is_last, &mut page, tag) && page == *b"a page of a pack"
        };
        assert!(opens(&cipher, 7, false, sealed, tag));
        assert!(!opens(&cipher, 8, false, sealed, tag));
        assert!(!opens(&cipher, 7, true, sealed, tag));
        for (object, head) in [("packs/b", b"head"), ("packs/", b"ahea"), ("packs/a", b"Head")] {
            assert!(!opens(&derived().cipher(object, head).unwrap(), 7, false, sealed, tag), "{object}");
        }
        for bit in 0..128 {
            let flip = |bytes: [u8; 16]| (u128::from_le_bytes(bytes) ^ 1 << bit).to_le_bytes();
            assert!(!opens(&cipher, 7, false, flip(sealed), tag), "bit {bit} of the page");
            assert!(!opens(&cipher, 7, false, sealed, flip(tag)), "bit {bit} of the tag");
        }
    }

    #[test]
    fn random_bytes_differ() {
        assert_ne!(random::<32>().unwrap(), random::<32>().unwrap());
    }
}
