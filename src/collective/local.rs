//! STUB
use super::*;
use std::sync::{Arc, Barrier, Mutex};
#[derive(Debug)]
struct Shared {
    barrier: Barrier,
    slots: Mutex<Vec<Option<(Memory, Memory)>>>,
    kids: Mutex<std::collections::BTreeMap<usize, Arc<Shared>>>,
    size: usize,
}
impl Shared {
    fn new(n: usize) -> Arc<Self> {
        Arc::new(Shared {
            barrier: Barrier::new(n),
            slots: Mutex::new(vec![None; n]),
            kids: Default::default(),
            size: n,
        })
    }
}
#[derive(Debug)]
pub struct Local {
    rank: usize,
    s: Arc<Shared>,
    root: Option<(Arc<Shared>, usize)>,
    pending: Mutex<std::collections::VecDeque<(Memory, Memory)>>,
    t: Mutex<Traffic>,
}
#[derive(Debug)]
pub struct World;
impl World {
    pub fn ends(n: usize) -> Vec<Local> {
        let s = Shared::new(n);
        (0..n)
            .map(|rank| Local {
                rank,
                s: s.clone(),
                root: None,
                pending: Default::default(),
                t: Default::default(),
            })
            .collect()
    }
}
pub fn run_ranks<T: Send>(ends: Vec<Local>, f: impl Fn(Local) -> Result<T> + Sync) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let hs: Vec<_> = ends.into_iter().map(|e| scope.spawn(|| f(e))).collect();
        hs.into_iter().map(|h| h.join().unwrap()).collect()
    })
}
fn sum(ms: &[(Memory, Memory)], from: usize, n: usize) -> Vec<f64> {
    let mut out32 = vec![0f32; n];
    let mut out64 = vec![0f64; n];
    let e = ms[0].0.element();
    for (m, _) in ms {
        for i in 0..n {
            unsafe {
                match e {
                    Element::F32 => out32[i] += *(m.address() as *const f32).add(from + i),
                    Element::F64 => out64[i] += *(m.address() as *const f64).add(from + i),
                    Element::Bf16 => out32[i] += (*(m.address() as *const half::bf16).add(from + i)).to_f32(),
                    _ => panic!(),
                }
            }
        }
    }
    if e == Element::F64 { out64 } else { out32.into_iter().map(f64::from).collect() }
}
fn put(m: &Memory, v: &[f64]) {
    for (i, v) in v.iter().enumerate() {
        unsafe {
            match m.element() {
                Element::F32 => *(m.address() as *mut f32).add(i) = *v as f32,
                Element::F64 => *(m.address() as *mut f64).add(i) = *v,
                Element::Bf16 => *(m.address() as *mut half::bf16).add(i) = half::bf16::from_f32(*v as f32),
                _ => panic!(),
            }
        }
    }
}
impl Local {
    fn all(&self, a: &Memory, b: &Memory) -> Vec<(Memory, Memory)> {
        self.s.slots.lock().unwrap()[self.rank] = Some((a.clone(), b.clone()));
        self.s.barrier.wait();
        let v = self.s.slots.lock().unwrap().iter().map(|x| x.clone().unwrap()).collect();
        self.s.barrier.wait();
        v
    }
    fn count(&self, op: Op, bytes: usize, root: bool) {
        self.t.lock().unwrap().count(op, bytes, self.s.size, root)
    }
}
impl Collective for Local {
    fn rank(&self) -> usize {
        self.rank
    }
    fn size(&self) -> usize {
        self.s.size
    }
    fn all_reduce(&self, _: Call, b: &Memory) -> Result<()> {
        self.count(Op::AllReduce, b.bytes(), false);
        let ms = self.all(b, b);
        let v = sum(&ms, 0, b.elements());
        self.s.barrier.wait();
        put(b, &v);
        self.s.barrier.wait();
        Ok(())
    }
    fn reduce_scatter(&self, _: Call, f: &Memory, s: &Memory) -> Result<()> {
        assert_eq!(f.elements(), s.elements() * self.s.size);
        self.count(Op::ReduceScatter, f.bytes(), false);
        let ms = self.all(f, s);
        let v = sum(&ms, self.rank * s.elements(), s.elements());
        self.s.barrier.wait();
        put(s, &v);
        self.s.barrier.wait();
        Ok(())
    }
    fn reduce_scatter_across(
        &self,
        _: Call,
        replicas: &dyn Collective,
        f: &Memory,
        s: &Memory,
    ) -> Result<()> {
        let (root, rank) = self.root.clone().unwrap();
        self.count(Op::ReduceScatter, f.bytes(), false);
        let _ = replicas;
        let me = Local { rank, s: root, root: None, pending: Default::default(), t: Default::default() };
        let ms = me.all(f, s);
        let v = sum(&ms, self.rank * s.elements(), s.elements());
        me.s.barrier.wait();
        put(s, &v);
        me.s.barrier.wait();
        Ok(())
    }
    fn start_all_gather(&self, _: Call, s: &Memory, f: &Memory) -> Result<Ticket> {
        assert_eq!(f.elements(), s.elements() * self.s.size);
        self.count(Op::AllGather, f.bytes(), false);
        self.pending.lock().unwrap().push_back((s.clone(), f.clone()));
        Ok(Ticket(0))
    }
    fn finish(&self, _: Ticket) -> Result<()> {
        let (s, f) = self.pending.lock().unwrap().pop_front().unwrap();
        let ms = self.all(&s, &f);
        for (i, (m, _)) in ms.iter().enumerate() {
            let to = f.address() + i * m.bytes();
            if to != m.address() {
                unsafe { std::ptr::copy_nonoverlapping(m.address() as *const u8, to as *mut u8, m.bytes()) }
            }
        }
        self.s.barrier.wait();
        Ok(())
    }
    fn broadcast(&self, _: Call, root: usize, b: &Memory) -> Result<()> {
        self.count(Op::Broadcast, b.bytes(), root == self.rank);
        let ms = self.all(b, b);
        if self.rank != root {
            unsafe {
                std::ptr::copy_nonoverlapping(
                    ms[root].0.address() as *const u8,
                    b.address() as *mut u8,
                    b.bytes(),
                )
            }
        }
        self.s.barrier.wait();
        Ok(())
    }
    fn barrier(&self, _: Call) -> Result<()> {
        self.count(Op::Barrier, 0, false);
        self.s.barrier.wait();
        Ok(())
    }
    fn split(&self, color: usize) -> Result<Box<dyn Collective>> {
        let m = unsafe { Memory::new(color, 0, Element::U8, Arc::new(())) };
        let ms = self.all(&m, &m);
        let members: Vec<usize> = (0..self.s.size).filter(|r| ms[*r].0.address() == color).collect();
        let s =
            self.s.kids.lock().unwrap().entry(color).or_insert_with(|| Shared::new(members.len())).clone();
        self.s.barrier.wait();
        self.s.kids.lock().unwrap().clear();
        self.s.barrier.wait();
        Ok(Box::new(Local {
            rank: members.iter().position(|r| *r == self.rank).unwrap(),
            s,
            root: Some((self.s.clone(), self.rank)),
            pending: Default::default(),
            t: Default::default(),
        }))
    }
    fn traffic(&self) -> Traffic {
        *self.t.lock().unwrap()
    }
    fn enter(&self, _: Phase) -> Result<()> {
        Ok(())
    }
    fn abort(&self, _: &str) {}
}
