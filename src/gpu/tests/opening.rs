//! What is missing is told, and devices are chosen.

use std::sync::Arc;

use cudarc::driver::sys::is_culib_present;

use super::*;
use crate::comm::{Communicator, Local};
use crate::error::{Error, UsageError};
use crate::gpu::memory::DeviceBytes;
use crate::gpu::{Device, Nccl, Packer, Sharing};

fn refusal(error: Error) -> String {
    assert!(matches!(error, Error::Usage(UsageError { hint: Some(_), .. })), "{error:?}");
    format!("{error} / {}", error.hint().unwrap())
}

#[test]
#[expect(clippy::print_stdout, reason = "whoever asks for this test learns why it was not run")]
fn without_a_driver_an_error_says_so() {
    // SAFETY: what the system has under the name of the driver is the driver.
    if unsafe { is_culib_present() } {
        println!("skipped: there is a CUDA driver");
        return;
    }
    let told = refusal(super::open(Kernels::Compiled, 0).unwrap_err());
    assert!(told.contains("no CUDA driver here") && told.contains("options::backend cpu"), "{told}");
}

#[test]
fn without_a_device_or_nccl_an_error_says_so_stand_in() {
    passes("opening::no_device", 0, &[]);
    passes("opening::no_nccl", 1, &[]);
}

#[test]
#[ignore = "a process of a test"]
fn no_device() {
    let told = refusal(super::open(kernels(), 0).unwrap_err());
    assert!(told.contains("no CUDA-capable device is detected") && told.contains("CUDA_VISIBLE_DEVICES"), "{told}");
}

#[test]
#[ignore = "a process of a test"]
fn no_nccl() {
    let settings = Settings { nccl: Some(NOWHERE.into()), ..Settings::default() };
    let told = refusal(crate::gpu::open(&settings, None).unwrap_err());
    assert!(told.contains(NOWHERE) && told.contains("DTSHARD_NCCL_LIB"), "{told}");
    // Its kernels can be looked at.
    let gpu = crate::gpu::open_alone(&settings).unwrap();
    assert!(gpu.nccl().unwrap_err().contains(NOWHERE));
    let error = Nccl::meet(&gpu, Sharing::Refused, &Arc::new(Local::fleet(1).remove(0))).map(drop).unwrap_err();
    assert!(error.to_string().contains(NOWHERE), "{error}");
}

#[test]
fn memory_that_is_short_is_told_stand_in() {
    passes("opening::short_of_memory", 1, &[("GPU_STAND_IN_MEMORY_MIB", "8")]);
}

#[test]
#[ignore = "a process of a test"]
fn short_of_memory() {
    let device = Device::open(None).unwrap();
    let mut bytes = DeviceBytes::new(&device, 1 << 20, "what is read").unwrap();
    let error = bytes.at_least(20 << 20, "what is read").unwrap_err();
    assert_eq!(
        error.to_string(),
        "GPU: allocate memory: 20.97 MB for what is read: out of memory (CUDA_ERROR_OUT_OF_MEMORY); the device has \
         7.34 MB left"
    );
    assert!(error.hint().unwrap().contains("options::bucket_size"));
    assert_eq!(bytes.len(), 1 << 20, "it is as it was");
    bytes.at_least((2 << 20) + 1, "what is read").unwrap();
    assert_eq!(bytes.len(), 4 << 20);
}

#[test]
fn devices_are_dealt_out_and_not_shared_stand_in() {
    passes("opening::each_its_own", 3, &[]);
    passes("opening::one_for_two", 1, &[("NCCL_MULTI_RANK_GPU_ENABLE", "1")]);
}

#[test]
#[ignore = "a process of a test"]
fn each_its_own() {
    let gpus = [0, 1, 2, 4].map(|rank| super::open(kernels(), rank).unwrap());
    let [first, second, third, fifth] = gpus.each_ref().map(|gpu| gpu.device.uuid());
    assert!(first != second && second != third && first != third && fifth == second);
    assert_eq!(format!("{:?}", gpus[2].device), "GPU 2 (stand-in (no GPU))");
    assert_eq!(matches!(gpus[0].packer, Packer::Kernel(_)), gpu_stand_in::HAS_KERNELS);
    let Packer::Copies(why) = super::open(Kernels::Off, 0).unwrap().packer else { panic!("it has a kernel") };
    assert!(why.contains("switched off"));
}

#[test]
#[ignore = "a process of a test"]
fn one_for_two() {
    let meet = |sharing: Sharing| {
        let ranks = Local::fleet(2).into_iter().map(|local| {
            std::thread::spawn(move || {
                let gpu = super::open(kernels(), local.rank()).unwrap();
                Nccl::meet(&gpu, sharing, &Arc::new(local)).and_then(Communicator::leave)
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    };
    for refused in meet(Sharing::Refused) {
        let told = refusal(refused.unwrap_err());
        assert!(told.contains("processes 0 and 1 have one GPU") && told.contains("DTSHARD_SHARE_GPU"), "{told}");
    }
    for met in meet(Sharing::Allowed) {
        met.unwrap();
    }
}

#[test]
fn switches_are_read_from_the_environment() {
    let of = |variables: &'static [(&str, &str)]| {
        let value = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
        Settings::new(&value)
    };
    assert_eq!(of(&[("DTSHARD_NCCL_LIB", ""), ("DTSHARD_SHARE_GPU", "0")]), Settings::default());
    let all = of(&[("DTSHARD_NCCL_LIB", NOWHERE), ("DTSHARD_SHARE_GPU", "1"), ("DTSHARD_GPU_KERNELS", "off")]);
    assert_eq!(all, Settings { nccl: Some(NOWHERE.into()), kernels: Kernels::Off, sharing: Sharing::Allowed });
}
