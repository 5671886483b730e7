//! Tests of the choice of a device, and of the errors if a library or a device is missing.

use std::sync::Arc;

use cudarc::driver::sys::is_culib_present;

use super::*;
use crate::comm::{Communicator, Local};
use crate::error::{Error, UsageError};
use crate::gpu::memory::DeviceBytes;
use crate::gpu::{Device, Nccl, Packer, Sharing};

fn usage_error_text(error: Error) -> String {
    assert!(matches!(error, Error::Usage(UsageError { hint: Some(_), .. })), "{error:?}");
    format!("{error} / {}", error.hint().unwrap())
}

#[test]
#[expect(clippy::print_stdout, reason = "the output says why the test was skipped")]
fn missing_driver_is_an_error() {
    // SAFETY: the library that the system has under the name of the driver is the driver.
    if unsafe { is_culib_present() } {
        println!("skipped: there is a CUDA driver");
        return;
    }
    let message = usage_error_text(super::open(Kernels::Compiled, 0).unwrap_err());
    assert!(message.contains("no CUDA driver: ") && message.contains("options::backend cpu"), "{message}");
}

#[test]
fn missing_device_or_nccl_is_an_error_stand_in() {
    run_test("opening::missing_device_is_an_error", 0, &[]);
    run_test("opening::missing_nccl_is_an_error", 1, &[]);
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn missing_device_is_an_error() {
    let message = usage_error_text(super::open(kernels(), 0).unwrap_err());
    assert!(
        message.contains("no CUDA-capable device is detected") && message.contains("CUDA_VISIBLE_DEVICES"),
        "{message}"
    );
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn missing_nccl_is_an_error() {
    let settings = Settings { nccl: Some(NOWHERE.into()), ..Settings::default() };
    let message = usage_error_text(crate::gpu::open(&settings, None).unwrap_err());
    assert!(message.contains(NOWHERE) && message.contains("DTSHARD_NCCL_LIB"), "{message}");
    // Without NCCL, the kernels still work.
    let gpu = crate::gpu::open_alone(&settings).unwrap();
    assert!(gpu.nccl().unwrap_err().contains(NOWHERE));
    let error = Nccl::meet(&gpu, Sharing::Refused, &Arc::new(Local::fleet(1).remove(0))).map(drop).unwrap_err();
    assert!(error.to_string().contains(NOWHERE), "{error}");
}

#[test]
fn out_of_device_memory_error_has_sizes_stand_in() {
    run_test("opening::out_of_memory_error_has_sizes", 1, &[("GPU_STAND_IN_MEMORY_MIB", "8")]);
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn out_of_memory_error_has_sizes() {
    let device = Device::open(None).unwrap();
    let mut bytes = DeviceBytes::new(&device, 1 << 20, "the read buffer").unwrap();
    let error = bytes.grow_to(20 << 20, "the read buffer").unwrap_err();
    assert_eq!(
        error.to_string(),
        "GPU: allocate memory: 20.97 MB for the read buffer: out of memory (CUDA_ERROR_OUT_OF_MEMORY); the device has \
         7.34 MB free"
    );
    assert!(error.hint().unwrap().contains("options::bucket_size"));
    assert_eq!(bytes.len(), 1 << 20, "an error leaves the memory unchanged");
    bytes.grow_to((2 << 20) + 1, "the read buffer").unwrap();
    assert_eq!(bytes.len(), 4 << 20);
}

#[test]
fn each_rank_gets_its_own_device_stand_in() {
    run_test("opening::each_rank_opens_its_own_device", 3, &[]);
    run_test("opening::shared_device_is_an_error_unless_allowed", 1, &[("NCCL_MULTI_RANK_GPU_ENABLE", "1")]);
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn each_rank_opens_its_own_device() {
    let gpus = [0, 1, 2, 4].map(|rank| super::open(kernels(), rank).unwrap());
    let [first, second, third, fifth] = gpus.each_ref().map(|gpu| gpu.device.uuid());
    assert!(first != second && second != third && first != third && fifth == second);
    assert_eq!(format!("{:?}", gpus[2].device), "GPU 2 (stand-in (no GPU))");
    assert_eq!(matches!(gpus[0].packer, Packer::Kernel(_)), gpu_stand_in::HAS_KERNELS);
    let Packer::Driver(why) = super::open(Kernels::Off, 0).unwrap().packer else { panic!("it has a kernel") };
    assert!(why.contains("switched off"));
}

#[test]
#[ignore = "runs as a child process that another test starts"]
fn shared_device_is_an_error_unless_allowed() {
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
        let message = usage_error_text(refused.unwrap_err());
        assert!(
            message.contains("processes 0 and 1 use the same GPU") && message.contains("DTSHARD_SHARE_GPU"),
            "{message}"
        );
    }
    for met in meet(Sharing::Allowed) {
        met.unwrap();
    }
}

#[test]
fn settings_are_read_from_the_environment() {
    let of = |variables: &'static [(&str, &str)]| {
        let value = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into());
        Settings::new(&value)
    };
    assert_eq!(of(&[("DTSHARD_NCCL_LIB", ""), ("DTSHARD_SHARE_GPU", "0")]), Settings::default());
    let all = of(&[("DTSHARD_NCCL_LIB", NOWHERE), ("DTSHARD_SHARE_GPU", "1"), ("DTSHARD_GPU_KERNELS", "off")]);
    assert_eq!(all, Settings { nccl: Some(NOWHERE.into()), kernels: Kernels::Off, sharing: Sharing::Allowed });
}
