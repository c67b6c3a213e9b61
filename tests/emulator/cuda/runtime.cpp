// SPDX-License-Identifier: Apache-2.0
// Runs kernels on the CPU: one fiber a CUDA thread, one operating-system thread a block of a
// cluster (shared memory is thread-local), and never more than one of them at a time. A fiber runs
// until it has to wait for others, so where it can be held up is exactly where CUDA says so.
//
// Kernels that were compiled with -fsanitize=thread report every access to memory here. The
// compiler's instrumentation is used without the sanitizer's own library: bounds are held against
// the arrays that exist and the shared memory of the launch, and races are found with one vector
// clock a fiber, which only a real barrier, fence or copy wait moves on.

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstdarg>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <xmmintrin.h>

#include "device.h"

#if !defined(__x86_64__)
#error "the emulator switches fibers in x86-64 assembly; no other architecture is supported"
#endif

extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");

namespace {

constexpr size_t STACK_BYTES = 256 * 1024, GUARD_BYTES = 4096;
constexpr size_t RACE_BYTES = 2 << 20;                 // races are not looked for in larger arrays
constexpr int CANARY_BYTES = 4096;                     // behind dynamic shared memory
constexpr unsigned char POISON = 0xff, CANARY = 0xa5;  // 0xff: NaN in every floating-point type

// Which of this thread's clock values another thread has seen, by a chain of synchronisation.
struct Clock;
using ClockPointer = std::shared_ptr<const Clock>;
using Before = std::map<unsigned, ClockPointer>;
struct Clock {
    unsigned cluster;
    std::vector<unsigned> seen;            // threads of this cluster
    std::shared_ptr<const Before> before;  // what is known of clusters that ran earlier; or null
};

struct Access {
    unsigned cluster = 0, clock = 0;
    int thread = -1;
    int line = 0;  // in code, from the kernel's entry
};
struct Cell {
    Access write, read, other_read;  // the last reads of two different warps
    bool in_flight = false;          // written by a copy that nobody has waited for
};

enum class Wait { NOTHING, WARP, BLOCK, NAMED, CLUSTER, MBARRIER };

struct PendingCopy {
    void* shared;
    const void* global;
    int bytes;
};

struct Fiber : EmulatorThread {
    void* stack_pointer;
    char* stack;
    int id;  // in the cluster
    int rank, warp, lane;
    bool done;
    Wait wait;
    const char* file;
    int line;
    EmulatorWarp what;
    unsigned mask;
    uint64_t value;
    int argument, width;
    void* barrier;
    unsigned parity;
    std::vector<std::vector<PendingCopy>> copies;  // the last group is open
    // Race detection.
    unsigned clock;
    ClockPointer seen;
    ClockPointer released;  // at the last fence
    unsigned cluster_generation;
    bool touched;  // global memory
};

struct Warp {
    unsigned lanes, ready, waiting, exited;
};

struct NamedBarrier {
    unsigned arrived = 0, threads = 0;
    std::vector<int> members;
};
struct Mbarrier {
    unsigned count, pending, phase;
    long long expected, sent;
    struct Copy {
        PendingCopy copy;
        int by;
    };
    std::vector<Copy> copies;
    ClockPointer clock;
};

struct Block {
    char* shared = nullptr;  // thread-local storage of the kernel's module
    std::vector<char*> dynamic;
    std::vector<Warp> warps;
    int first_fiber, current_warp;
    int arrived, predicates, predicate_result;
    std::map<unsigned, NamedBarrier> named;
    void* scheduler;
    std::vector<Cell> cells;
};

struct Range {
    uintptr_t begin, end;
    std::string name;
    std::vector<Cell> cells;
};

struct Variable {
    unsigned long long size;
    std::string name;
};

struct Options {
    int schedule;  // 0: a warp runs ahead as far as it can; 1: the last warp first; 2: by seed
    unsigned seed;
    int checked;
};

// What one launch holds. Only one operating-system thread runs at a time, so all of it is global.
const EmulatorKernel* kernel;
const EmulatorDynamic* dynamic_arrays;
int dynamic_count;
char* (*module_anchor)();
const void* packed;
Options options;
unsigned shared_bytes;
size_t shared_size;
std::vector<Fiber> fibers;
std::vector<Block> blocks;
std::vector<char*> stacks;
std::map<void*, Mbarrier> mbarriers;
std::map<uintptr_t, Range> ranges;
std::map<unsigned long long, Variable> variables;  // in shared memory, by offset
std::map<void*, ClockPointer> atomics;
std::vector<std::pair<uintptr_t, uintptr_t>> images;
Fiber* current;
size_t prefetched_bytes;  // by all launches since it was asked for
int turn;
int cluster_arrived;
unsigned cluster_generation;
unsigned cluster_serial, first_cluster;
bool failed, finished;
std::string message;
std::mt19937 random_numbers;
std::mutex baton;
std::condition_variable baton_passed;

std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));
std::string format(const char* text, ...) {
    char buffer[1024];
    va_list arguments;
    va_start(arguments, text);
    vsnprintf(buffer, sizeof buffer, text, arguments);
    va_end(arguments);
    return buffer;
}

std::string who(const Fiber& fiber) {
    const uint3 b = fiber.block_index, t = fiber.thread_index;
    return format("block (%u, %u, %u) thread (%u, %u, %u)", b.x, b.y, b.z, t.x, t.y, t.z);
}
std::string where(const char* file, int line) { return format("%s:%d", file, line); }
// An address in code, which Python turns into a line.
std::string where(void* address) {
    Dl_info info;
    if (dladdr(address, &info) == 0) return "an unknown line";
    return format("{%s+%lx}", info.dli_fname,
                  static_cast<unsigned long>(static_cast<char*>(address) -
                                             static_cast<char*>(info.dli_fbase) - 1));
}

void* code_at(int line) { return reinterpret_cast<char*>(kernel->run) + line; }
int code_offset(void* line) {
    return static_cast<int>(static_cast<char*>(line) - reinterpret_cast<char*>(kernel->run));
}

void record(const std::string& text) {
    if (!failed) message = text;
    failed = true;
}
[[noreturn]] void leave() {
    // The fibers of a failed launch are dropped where they stand.
    void* ignored;
    emulator_switch(&ignored, blocks[turn].scheduler);
    abort();
}
[[noreturn]] void fault(const std::string& line, const std::string& text) {
    record(who(*current) + " at " + line + ": " + text);
    leave();
}

const char* const WARP_NAMES[] = {"__syncwarp",       "__shfl_sync",     "__shfl_up_sync",
                                  "__shfl_down_sync", "__shfl_xor_sync", "a vote",
                                  "__match_any_sync"};

// Scheduling.

Warp& warp_of(const Fiber& fiber) { return blocks[fiber.rank].warps[fiber.warp]; }

void make_ready(Fiber& fiber) {
    fiber.wait = Wait::NOTHING;
    warp_of(fiber).ready |= 1u << fiber.lane;
}

void suspend(Wait wait, const char* file, int line) {
    Fiber& self = *current;
    self.wait = wait;
    self.file = file;
    self.line = line;
    warp_of(self).ready &= ~(1u << self.lane);
    emulator_switch(&self.stack_pointer, blocks[self.rank].scheduler);
}

Fiber* next_fiber(Block& block) {
    const int count = static_cast<int>(block.warps.size());
    const auto start = [&] {
        if (options.schedule == 1) return count - 1;
        if (options.schedule == 2 && random_numbers() % 4 == 0) {
            return static_cast<int>(random_numbers() % count);
        }
        return block.current_warp;
    }();
    for (int i = 0; i < count; ++i) {
        const int step = options.schedule == 1 ? count - i : i;
        const int warp = (start + step) % count;
        unsigned ready = block.warps[warp].ready;
        if (ready == 0) continue;
        block.current_warp = warp;
        if (options.schedule == 2) {
            for (int skip = random_numbers() % __builtin_popcount(ready); skip > 0; --skip) {
                ready &= ready - 1;
            }
        }
        const int lane = options.schedule == 1 ? 31 - __builtin_clz(ready) : __builtin_ctz(ready);
        return &fibers[block.first_fiber + warp * 32 + lane];
    }
    return nullptr;
}

bool is_ready(const Block& block) {
    return std::any_of(block.warps.begin(), block.warps.end(),
                       [](const Warp& warp) { return warp.ready != 0; });
}

std::string describe_wait(const Fiber& fiber) {
    std::string text;
    switch (fiber.wait) {
        case Wait::NOTHING: text = "nothing"; break;
        case Wait::WARP:
            text = format("%s with mask 0x%08x", WARP_NAMES[fiber.what], fiber.mask);
            break;
        case Wait::BLOCK: text = "__syncthreads"; break;
        case Wait::NAMED: text = format("barrier %u", fiber.parity); break;
        case Wait::CLUSTER: text = "the cluster barrier"; break;
        case Wait::MBARRIER: text = format("an mbarrier's parity %u", fiber.parity); break;
    }
    return text + " at " + where(fiber.file, fiber.line);
}

void report_deadlock() {
    std::map<std::string, std::vector<const Fiber*>> groups;
    int gone = 0;
    for (const Fiber& fiber : fibers) {
        if (fiber.done) {
            ++gone;
        } else {
            groups[describe_wait(fiber)].push_back(&fiber);
        }
    }
    std::string text = "deadlock: ";
    for (const auto& [wait, members] : groups) {
        text += format("%zu threads from %s wait for %s; ", members.size(),
                       who(*members.front()).c_str(), wait.c_str());
    }
    record(text + format("%d of %zu threads have left the kernel", gone, fibers.size()));
}

// Gives the turn to the next block of the cluster that can run; false when there is none.
bool choose_turn() {
    const int count = static_cast<int>(blocks.size());
    const int start = options.schedule == 2 ? random_numbers() % count : turn;
    for (int i = 0; i < count; ++i) {
        if (is_ready(blocks[(start + i) % count])) {
            turn = (start + i) % count;
            return true;
        }
    }
    return false;
}

// The loop of one block, on its own operating-system thread.
void run_block(int rank) {
    Block& block = blocks[rank];
    std::unique_lock<std::mutex> lock(baton);
    for (;;) {
        baton_passed.wait(lock, [&] { return finished || turn == rank; });
        if (finished) return;
        Fiber* fiber = failed ? nullptr : next_fiber(block);
        if (fiber != nullptr) {
            current = fiber;
            emulator_thread = fiber;
            emulator_switch(&block.scheduler, fiber->stack_pointer);
            // In a cluster drawn by seed another block may go on at any switch.
            if (options.schedule == 2 && blocks.size() > 1 && !failed) {
                if (choose_turn() && turn != rank) baton_passed.notify_all();
            }
            continue;
        }
        if (!failed && choose_turn()) {
            baton_passed.notify_all();
            continue;
        }
        const bool all_done =
            std::all_of(fibers.begin(), fibers.end(), [](const Fiber& f) { return f.done; });
        if (!failed && !all_done) report_deadlock();
        finished = true;
        baton_passed.notify_all();
        return;
    }
}

// Race detection.

void take_maximum(std::vector<unsigned>& into, const std::vector<unsigned>& from) {
    for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], from[i]);
}

void add_before(Before& before, unsigned cluster, const ClockPointer& clock) {
    ClockPointer& known = before[cluster];
    if (known && known != clock) {
        auto both = std::make_shared<Clock>(*known);
        take_maximum(both->seen, clock->seen);
        known = both;
    } else {
        known = clock;
    }
}

// What one knows who knows all of this, for the cluster that runs now.
ClockPointer joined(const std::vector<ClockPointer>& clocks) {
    auto result = std::make_shared<Clock>();
    result->cluster = cluster_serial;
    result->seen.assign(fibers.size(), 0);
    const Clock* last = nullptr;
    std::vector<ClockPointer> earlier;
    std::vector<std::shared_ptr<const Before>> befores;
    for (const ClockPointer& clock : clocks) {
        if (!clock || clock.get() == last) continue;
        last = clock.get();
        if (clock->cluster == cluster_serial) {
            take_maximum(result->seen, clock->seen);
        } else {
            earlier.push_back(clock);
        }
        const auto& before = clock->before;
        if (before && std::find(befores.begin(), befores.end(), before) == befores.end()) {
            befores.push_back(before);
        }
    }
    if (earlier.empty() && befores.size() <= 1) {
        if (!befores.empty()) result->before = befores[0];
        return result;
    }
    auto merged = std::make_shared<Before>();
    for (const auto& before : befores) {
        for (const auto& [cluster, clock] : *before) add_before(*merged, cluster, clock);
    }
    for (const ClockPointer& clock : earlier) add_before(*merged, clock->cluster, clock);
    result->before = merged;
    return result;
}

// What a fiber knows at this moment, itself included; its later accesses are not covered.
ClockPointer snapshot(Fiber& fiber) {
    auto result = std::make_shared<Clock>(*fiber.seen);
    result->seen[fiber.id] = fiber.clock++;
    return result;
}

void synchronise(const std::vector<Fiber*>& members) {
    if (!options.checked) return;
    std::vector<ClockPointer> clocks;
    for (Fiber* fiber : members) clocks.push_back(fiber->seen);
    std::sort(clocks.begin(), clocks.end());
    auto result = std::make_shared<Clock>(*joined(clocks));
    for (Fiber* fiber : members) result->seen[fiber->id] = fiber->clock++;
    for (Fiber* fiber : members) fiber->seen = result;
    // A fence before a barrier publishes for every thread that meets there.
    std::vector<ClockPointer> released;
    for (Fiber* fiber : members) released.push_back(fiber->released);
    std::sort(released.begin(), released.end());
    if (released.back() == nullptr) return;
    const ClockPointer merged = joined(released);
    for (Fiber* fiber : members) fiber->released = merged;
}

bool happened_before(const Access& access, const Fiber& fiber) {
    if (access.cluster == cluster_serial) {
        return access.thread == fiber.id || access.clock <= fiber.seen->seen[access.thread];
    }
    if (!fiber.seen->before) return false;
    const auto found = fiber.seen->before->find(access.cluster);
    return found != fiber.seen->before->end() && access.clock <= found->second->seen[access.thread];
}

std::string other(const Access& access) {
    if (access.cluster == cluster_serial) return who(fibers[access.thread]);
    return format("thread %d of cluster %u, counted from the grid's first,", access.thread,
                  access.cluster - first_cluster);
}

void check_cell(Cell& cell, bool write, bool shared, void* line, const char* place) {
    Fiber& self = *current;
    const auto live = [&](const Access& access) {
        return shared ? access.cluster == cluster_serial : access.cluster >= first_cluster;
    };
    if (shared && !write) {
        if (cell.in_flight && live(cell.write)) {
            fault(where(line), format("reads %s before its copy has been waited for", place));
        }
        if (!live(cell.write)) {
            fault(where(line), format("reads %s that nobody has written", place));
        }
    }
    if (live(cell.write) && !happened_before(cell.write, self)) {
        fault(where(line), format("race: %s %s that %s wrote at %s with no barrier between",
                                  write ? "writes" : "reads", place, other(cell.write).c_str(),
                                  where(code_at(cell.write.line)).c_str()));
    }
    const Access now = {cluster_serial, self.clock, self.id, code_offset(line)};
    if (write) {
        for (const Access& read : {cell.read, cell.other_read}) {
            if (live(read) && !happened_before(read, self)) {
                fault(where(line),
                      format("race: writes %s that %s read at %s with no barrier between", place,
                             other(read).c_str(), where(code_at(read.line)).c_str()));
            }
        }
        cell.write = now;
        cell.in_flight = false;
        cell.read = cell.other_read = Access();
    } else {
        const bool same_warp = cell.read.thread >= 0 && cell.read.cluster == cluster_serial &&
                               cell.read.thread / 32 == self.id / 32;
        if (!same_warp) cell.other_read = cell.read;
        cell.read = now;
    }
}

bool in_image(uintptr_t address, size_t bytes) {
    for (const auto& [begin, end] : images) {
        if (address >= begin && address + bytes <= end) return true;
    }
    return false;
}

// The rank whose shared memory holds the address, or -1.
int shared_rank(uintptr_t address) {
    for (size_t rank = 0; rank < blocks.size(); ++rank) {
        const auto begin = reinterpret_cast<uintptr_t>(blocks[rank].shared);
        if (address >= begin && address < begin + shared_size) return static_cast<int>(rank);
    }
    return -1;
}

void check_access(const void* pointer, size_t bytes, bool write, void* line) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    Fiber& self = *current;
    const auto stack = reinterpret_cast<uintptr_t>(self.stack);
    if (address >= stack && address + bytes <= stack + STACK_BYTES) return;
    const char* verb = write ? "writes" : "reads";
    const int rank = shared_rank(address);
    if (rank >= 0) {
        Block& block = blocks[rank];
        for (int i = 0; i < dynamic_count; ++i) {
            const auto begin = reinterpret_cast<uintptr_t>(block.dynamic[i]);
            if (address >= begin && address < begin + dynamic_arrays[i].capacity + CANARY_BYTES &&
                address + bytes > begin + shared_bytes) {
                fault(where(line),
                      format("%s %zu bytes at byte %zu of dynamic shared memory, which "
                             "has %u bytes",
                             verb, bytes, address - begin, shared_bytes));
            }
        }
        const size_t offset = address - reinterpret_cast<uintptr_t>(block.shared);
        const auto after = variables.upper_bound(offset);
        if (after != variables.begin()) {
            const auto& [begin, variable] = *std::prev(after);
            if (offset + bytes > begin + variable.size) {
                fault(where(line),
                      format("%s %zu bytes at byte %zu of the shared variable %s, which "
                             "has %llu bytes",
                             verb, bytes, offset - static_cast<size_t>(begin),
                             variable.name.c_str(), variable.size));
            }
        }
        for (size_t i = 0; i < bytes; ++i) {
            check_cell(block.cells[offset + i], write, true, line, "shared memory");
        }
        return;
    }
    auto after = ranges.upper_bound(address);
    if (after != ranges.begin()) {
        Range& range = std::prev(after)->second;
        if (address < range.end) {
            self.touched = true;
            if (address + bytes > range.end) {
                fault(where(line),
                      format("%s %zu bytes that end %zu bytes behind the end of an array "
                             "of %zu bytes",
                             verb, bytes, address + bytes - range.end, range.end - range.begin));
            }
            if (range.end - range.begin > RACE_BYTES) return;
            if (range.cells.empty()) range.cells.resize(range.end - range.begin);
            for (size_t i = 0; i < bytes; ++i) {
                check_cell(range.cells[address - range.begin + i], write, false, line,
                           "global memory");
            }
            return;
        }
    }
    if (in_image(address, bytes)) return;
    const auto known = reinterpret_cast<uintptr_t>(fibers.data());  // threadIdx and its like
    if (!write && address >= known && address < known + fibers.size() * sizeof(Fiber)) return;
    const auto argument = reinterpret_cast<uintptr_t>(packed);
    if (!write && address >= argument && address + bytes <= argument + kernel->packed_size) return;
    std::string nearest = "no array is near";
    uintptr_t best = 1 << 20;
    for (const auto& [begin, range] : ranges) {
        if (address >= range.end && address - range.end < best) {
            best = address - range.end;
            nearest = format("%zu bytes behind the end of an array of %zu bytes", best,
                             range.end - range.begin);
        } else if (address < begin && begin - address < best) {
            best = begin - address;
            nearest = format("%zu bytes before the begin of an array of %zu bytes", best,
                             range.end - range.begin);
        }
    }
    fault(where(line), format("%s %zu bytes out of bounds: %s", verb, bytes, nearest.c_str()));
}

// A copy engine's accesses, in the name of the thread that began the copy.
void check_copy(const PendingCopy& copy, bool arrives, void* line) {
    if (!options.checked) return;
    check_access(copy.shared, copy.bytes, true, line);
    if (arrives) check_access(copy.global, copy.bytes, false, line);
    const int rank = shared_rank(reinterpret_cast<uintptr_t>(copy.shared));
    if (rank < 0) return;
    Cell* cells = &blocks[rank].cells[static_cast<char*>(copy.shared) - blocks[rank].shared];
    for (int i = 0; i < copy.bytes; ++i) cells[i].in_flight = !arrives;
}

void perform(const PendingCopy& copy) { memcpy(copy.shared, copy.global, copy.bytes); }

void begin_copy(const PendingCopy& copy, const char* what, bool sizes_fit, const char* file,
                int line, void* address) {
    const auto from = reinterpret_cast<uintptr_t>(copy.global);
    const auto to = reinterpret_cast<uintptr_t>(copy.shared);
    const int alignment = std::min(copy.bytes, 16);
    if (!sizes_fit) {
        fault(where(file, line),
              format("%s of %d bytes: the size is not allowed", what, copy.bytes));
    }
    if (from % alignment != 0 || to % alignment != 0) {
        fault(where(file, line),
              format("misaligned %s of %d bytes: from address ...%03zx to ...%03zx", what,
                     copy.bytes, from & 0xfff, to & 0xfff));
    }
    if (shared_rank(to) != current->rank) {
        fault(where(file, line), format("%s into memory that is not this block's shared", what));
    }
    check_copy(copy, false, address);
    memset(copy.shared, POISON, copy.bytes);
}

// Barriers.

std::vector<Fiber*> block_members(int rank) {
    std::vector<Fiber*> members;
    for (Fiber& fiber : fibers) {
        if (fiber.rank == rank) members.push_back(&fiber);
    }
    return members;
}

void exit_thread() {
    Fiber& self = *current;
    if (!self.copies.empty()) {
        for (const auto& group : self.copies) {
            if (!group.empty())
                fault("the end of the kernel", "leaves with a copy never waited for");
        }
    }
    self.done = true;
    Warp& warp = warp_of(self);
    warp.ready &= ~(1u << self.lane);
    warp.exited |= 1u << self.lane;
    for (unsigned waiting = warp.waiting; waiting != 0; waiting &= waiting - 1) {
        const Fiber& fiber = fibers[&self - fibers.data() - self.lane + __builtin_ctz(waiting)];
        if ((fiber.mask >> self.lane & 1) != 0) {
            fault(
                where(fiber.file, fiber.line),
                format("lane %d has left the kernel but is in the mask 0x%08x of %s, where lane %d "
                       "waits",
                       self.lane, fiber.mask, WARP_NAMES[fiber.what], fiber.lane));
        }
    }
    leave();
}

void fiber_main() {
    kernel->run(packed);
    exit_thread();
}

uint64_t shuffle_result(const Fiber& fiber, Fiber* warp, const char* file, int line) {
    const int segment = fiber.lane & ~(fiber.width - 1);
    int source = fiber.lane;
    bool in_range = true;
    switch (fiber.what) {
        case SHUFFLE_INDEX: source = segment + (fiber.argument & (fiber.width - 1)); break;
        case SHUFFLE_UP:
            source = fiber.lane - fiber.argument;
            in_range = source >= segment;
            break;
        case SHUFFLE_DOWN:
            source = fiber.lane + fiber.argument;
            in_range = source < segment + fiber.width;
            break;
        default: source = fiber.lane ^ fiber.argument; in_range = source < segment + fiber.width;
    }
    if (!in_range) return fiber.value;
    if (source < 0 || source > 31 || (fiber.mask >> source & 1) == 0) {
        fault(where(file, line),
              format("wrong mask: lane %d reads lane %d, which is not in the mask "
                     "0x%08x of %s",
                     fiber.lane, source, fiber.mask, WARP_NAMES[fiber.what]));
    }
    return warp[source].value;
}

void start_fiber(Fiber& fiber) {
    auto* top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES);
    *--top = nullptr;  // keeps the stack aligned as after a call
    *--top = reinterpret_cast<void*>(&fiber_main);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    fiber.stack_pointer = top;
}

char* stack_at(size_t index) {
    while (stacks.size() <= index) {
        void* memory = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        mprotect(memory, GUARD_BYTES, PROT_NONE);
        stacks.push_back(static_cast<char*>(memory) + GUARD_BYTES);
    }
    return stacks[index];
}

struct ModuleSearch {
    const void* inside;
    char* storage = nullptr;
    size_t size = 0;
};
int find_module(dl_phdr_info* info, size_t, void* data) {
    auto& search = *static_cast<ModuleSearch*>(data);
    const auto wanted = reinterpret_cast<uintptr_t>(search.inside);
    bool here = false;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& header = info->dlpi_phdr[i];
        const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
        if (header.p_type == PT_LOAD && wanted >= begin && wanted < begin + header.p_memsz)
            here = true;
    }
    if (!here) return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& header = info->dlpi_phdr[i];
        const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
        if (header.p_type == PT_LOAD) images.push_back({begin, begin + header.p_memsz});
        if (header.p_type == PT_TLS) {
            search.storage = static_cast<char*>(info->dlpi_tls_data);
            search.size = header.p_memsz;
        }
    }
    return 1;
}

// On the block's own thread: where its shared memory lies. Fills it with NaN.
void prepare_shared(int rank) {
    Block& block = blocks[rank];
    // The first block of every cluster runs on the thread that launched.
    if (rank > 0 || block.shared == nullptr) {
        ModuleSearch search = {reinterpret_cast<const void*>(kernel->run)};
        module_anchor();
        dl_iterate_phdr(find_module, &search);
        ModuleSearch runtime = {reinterpret_cast<const void*>(&emulator_lane)};
        dl_iterate_phdr(find_module, &runtime);
        block.shared = search.storage;
        shared_size = search.size;
    }
    char* begin = block.shared;
    block.dynamic.clear();
    std::vector<std::pair<char*, size_t>> skipped;
    for (int i = 0; i < dynamic_count; ++i) {
        char* array = static_cast<char*>(dynamic_arrays[i].address());
        block.dynamic.push_back(array);
        skipped.push_back({array, dynamic_arrays[i].capacity + CANARY_BYTES});
        memset(array, POISON, shared_bytes);
        memset(array + shared_bytes, CANARY, CANARY_BYTES);
    }
    std::sort(skipped.begin(), skipped.end());
    for (const auto& [array, bytes] : skipped) {
        memset(begin, POISON, array - begin);
        begin = array + bytes;
    }
    memset(begin, POISON, block.shared + shared_size - begin);
    if (options.checked && block.cells.size() != shared_size) block.cells.resize(shared_size);
}

void check_canaries(const Block& block) {
    for (const char* array : block.dynamic) {
        for (int i = 0; i < CANARY_BYTES; ++i) {
            if (static_cast<unsigned char>(array[shared_bytes + i]) == CANARY) continue;
            record(format(
                "block (%u, %u, %u): dynamic shared memory of %u bytes was written at byte "
                "%u",
                fibers[block.first_fiber].block_index.x, fibers[block.first_fiber].block_index.y,
                fibers[block.first_fiber].block_index.z, shared_bytes, shared_bytes + i));
            return;
        }
    }
}

// A signal stack for this operating-system thread: a fiber's own may be what is full.
struct SignalStack {
    std::vector<char> memory = std::vector<char>(64 * 1024);
    stack_t before;
    SignalStack() {
        stack_t own = {};
        own.ss_sp = memory.data();
        own.ss_size = memory.size();
        sigaltstack(&own, &before);
    }
    ~SignalStack() { sigaltstack(&before, nullptr); }
};

void flush_subnormals() { _mm_setcsr(_mm_getcsr() | 0x8040); }

void run_cluster(dim3 grid, dim3 block, unsigned long long first_block) {
    const int cluster_size = kernel->cluster_size;
    const int threads = block.x * block.y * block.z;
    ++cluster_serial;
    fibers.resize(static_cast<size_t>(threads) * cluster_size);
    blocks.resize(cluster_size);
    mbarriers.clear();
    cluster_arrived = 0;
    cluster_generation = 0;
    finished = false;
    turn = 0;
    ClockPointer nothing;
    if (options.checked) {
        auto clock = std::make_shared<Clock>();
        clock->cluster = cluster_serial;
        clock->seen.assign(fibers.size(), 0);
        nothing = clock;
    }
    for (int rank = 0; rank < cluster_size; ++rank) {
        Block& state = blocks[rank];
        state.warps.assign((threads + 31) / 32, Warp());
        state.first_fiber = rank * threads;
        state.current_warp = 0;
        state.arrived = state.predicates = 0;
        state.named.clear();
        const unsigned long long index = first_block + rank;
        for (int i = 0; i < threads; ++i) {
            Fiber& fiber = fibers[rank * threads + i];
            fiber.thread_index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
            fiber.block_index = {static_cast<unsigned>(index % grid.x),
                                 static_cast<unsigned>(index / grid.x % grid.y),
                                 static_cast<unsigned>(index / grid.x / grid.y)};
            fiber.block_dim = block;
            fiber.grid_dim = grid;
            fiber.id = rank * threads + i;
            fiber.stack = stack_at(fiber.id);
            fiber.rank = rank;
            fiber.warp = i / 32;
            fiber.lane = i % 32;
            fiber.done = false;
            fiber.touched = false;
            fiber.wait = Wait::NOTHING;
            fiber.copies.clear();
            fiber.clock = 1;
            fiber.seen = nothing;
            fiber.released = nullptr;
            fiber.cluster_generation = 0;
            state.warps[fiber.warp].lanes |= 1u << fiber.lane;
            state.warps[fiber.warp].ready |= 1u << fiber.lane;
            start_fiber(fiber);
        }
        // Lanes that do not exist cannot take part any more than those that have left.
        for (Warp& warp : state.warps) warp.exited = ~warp.lanes;
    }
    std::vector<std::thread> workers;
    int prepared = 1;
    for (int rank = 1; rank < cluster_size; ++rank) {
        workers.emplace_back([rank, &prepared] {
            const SignalStack signal_stack;
            flush_subnormals();
            {
                std::unique_lock<std::mutex> lock(baton);
                baton_passed.wait(lock, [&] { return prepared == rank; });
                prepare_shared(rank);
                ++prepared;
                baton_passed.notify_all();
            }
            {
                std::unique_lock<std::mutex> lock(baton);
                baton_passed.wait(lock, [&] { return prepared > kernel->cluster_size; });
            }
            run_block(rank);
            std::unique_lock<std::mutex> lock(baton);
            if (!failed) check_canaries(blocks[rank]);
        });
    }
    {
        std::unique_lock<std::mutex> lock(baton);
        prepare_shared(0);
        baton_passed.notify_all();
        baton_passed.wait(lock, [&] { return prepared == cluster_size; });
        prepared = cluster_size + 1;
        baton_passed.notify_all();
    }
    run_block(0);
    for (std::thread& worker : workers) worker.join();
    if (!failed) check_canaries(blocks[0]);
    if (!failed) {
        for (const auto& [address, barrier] : mbarriers) {
            if (!barrier.copies.empty()) record("a block leaves with a bulk copy never waited for");
        }
    }
}

// A fault of the processor ends in the scheduler like any other: the handler goes on at `leave`, at
// the top of the fiber's stack, whose frames nobody needs any more.
void on_fault(int signal, siginfo_t* info, void* context) {
    if (current == nullptr) abort();
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    record(
        who(*current) + " at " + where(reinterpret_cast<void*>(registers[REG_RIP] + 1)) +
        format(": %s at address %p (outside of every mapping, a misaligned vector or a full stack)",
               signal == SIGFPE ? "division by zero" : "segmentation fault", info->si_addr));
    registers[REG_RIP] = reinterpret_cast<greg_t>(&leave);
    registers[REG_RSP] = reinterpret_cast<greg_t>(current->stack + STACK_BYTES - 8);
}

}  // namespace

// What kernels call.

extern "C" {

const EmulatorThread* emulator_thread;

unsigned emulator_lane() { return current->lane; }

uint64_t emulator_warp(EmulatorWarp what, unsigned mask, uint64_t value, int argument, int width,
                       const char* file, int line) {
    Fiber& self = *current;
    Warp& warp = warp_of(self);
    Fiber* lanes = &self - self.lane;
    if ((mask >> self.lane & 1) == 0) {
        fault(where(file, line),
              format("wrong mask: lane %d calls %s with mask 0x%08x, which does not "
                     "hold it",
                     self.lane, WARP_NAMES[what], mask));
    }
    if ((warp.exited & mask) != 0) {
        fault(where(file, line),
              format("lane %d has left the kernel but is in the mask 0x%08x of %s",
                     __builtin_ctz(warp.exited & mask), mask, WARP_NAMES[what]));
    }
    if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
        fault(where(file, line), format("%s with width %d", WARP_NAMES[what], width));
    }
    if (const unsigned met = warp.waiting & mask; met != 0) {
        const Fiber& fiber = lanes[__builtin_ctz(met)];
        if (fiber.mask != mask || fiber.what != what) {
            fault(
                where(file, line),
                format(
                    "wrong mask: lane %d calls %s with mask 0x%08x while lane %d waits at %s with "
                    "mask 0x%08x at %s",
                    self.lane, WARP_NAMES[what], mask, fiber.lane, WARP_NAMES[fiber.what],
                    fiber.mask, where(fiber.file, fiber.line).c_str()));
        }
    }
    self.what = what;
    self.mask = mask;
    self.value = value;
    self.argument = argument;
    self.width = width;
    warp.waiting |= 1u << self.lane;
    if ((warp.waiting & mask) != mask) {
        suspend(Wait::WARP, file, line);
        return self.value;
    }
    uint64_t results[32] = {};
    unsigned ballot = 0;
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        if (lanes[lane].value != 0) ballot |= 1u << lane;
    }
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        if (what == SYNCWARP) continue;
        results[lane] = what == BALLOT ? ballot : shuffle_result(lanes[lane], lanes, file, line);
    }
    if (what == SYNCWARP && options.checked) {
        std::vector<Fiber*> members;
        for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
            members.push_back(&lanes[__builtin_ctz(rest)]);
        }
        synchronise(members);
    }
    for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
        Fiber& fiber = lanes[__builtin_ctz(rest)];
        fiber.value = results[fiber.lane];
        make_ready(fiber);
    }
    warp.waiting &= ~mask;
    return self.value;
}

int emulator_syncthreads_count(int predicate, const char* file, int line) {
    Fiber& self = *current;
    Block& block = blocks[self.rank];
    const int threads = self.block_dim.x * self.block_dim.y * self.block_dim.z;
    if (block.arrived > 0) {
        for (int i = 0; i < threads; ++i) {
            const Fiber& fiber = fibers[block.first_fiber + i];
            if (fiber.wait != Wait::BLOCK) continue;
            if (fiber.line != line || strcmp(fiber.file, file) != 0) {
                fault(where(file, line), "meets " + who(fiber) + " at another __syncthreads: " +
                                             where(fiber.file, fiber.line));
            }
            break;
        }
    }
    block.predicates += predicate;
    if (++block.arrived < threads) {
        suspend(Wait::BLOCK, file, line);
        return block.predicate_result;
    }
    block.predicate_result = block.predicates;
    block.arrived = block.predicates = 0;
    if (options.checked) synchronise(block_members(self.rank));
    for (int i = 0; i < threads; ++i) make_ready(fibers[block.first_fiber + i]);
    return block.predicate_result;
}

void emulator_syncthreads(const char* file, int line) { emulator_syncthreads_count(0, file, line); }

void emulator_named_barrier(unsigned id, unsigned threads, bool wait, const char* file, int line) {
    Fiber& self = *current;
    NamedBarrier& barrier = blocks[self.rank].named[id];
    if (barrier.arrived > 0 && barrier.threads != threads) {
        fault(where(file, line), format("barrier %u is met with %u and with %u threads", id,
                                        threads, barrier.threads));
    }
    if (threads % 32 != 0 || id > 15) {
        fault(where(file, line), format("barrier %u of %u threads is not allowed", id, threads));
    }
    barrier.threads = threads;
    barrier.members.push_back(self.id);
    if (++barrier.arrived < threads) {
        self.parity = id;
        if (wait) suspend(Wait::NAMED, file, line);
        return;
    }
    std::vector<Fiber*> members;
    for (const int member : barrier.members) {
        members.push_back(&fibers[member]);
        if (fibers[member].wait == Wait::NAMED) make_ready(fibers[member]);
    }
    synchronise(members);
    barrier = NamedBarrier();
}

uint64_t emulator_atomic(void* address, int size, char kind, EmulatorAtomic what, uint64_t operand,
                         uint64_t compare, const char* file, int line) {
    const auto apply = [&](auto zero) {
        using T = decltype(zero);
        T old, by, expected;
        memcpy(&by, &operand, sizeof(T));
        memcpy(&expected, &compare, sizeof(T));
        memcpy(&old, address, sizeof(T));
        T result = by;
        switch (what) {
            case ADD: result = old + by; break;
            case EXCHANGE: break;
            case COMPARE: result = memcmp(&old, &expected, sizeof(T)) == 0 ? by : old; break;
            case MINIMUM: result = std::min(old, by); break;
            case MAXIMUM: result = std::max(old, by); break;
            case INCREMENT: result = old >= by ? T(0) : old + T(1); break;
            case DECREMENT: result = old == T(0) || old > by ? by : old - T(1); break;
            default:
                if constexpr (std::is_integral_v<T>) {
                    result = what == AND ? (old & by) : what == OR ? (old | by) : (old ^ by);
                }
        }
        const bool changed = memcmp(&result, &old, sizeof(T)) != 0;
        memcpy(address, &result, sizeof(T));
        // Released by a fence before. An operation that changes nothing only reads here.
        if (changed && current->released) {
            ClockPointer& published = atomics[address];
            published = joined({current->released, published});
        }
        uint64_t bits = 0;
        memcpy(&bits, &old, sizeof(T));
        return bits;
    };
    const auto place = reinterpret_cast<uintptr_t>(address);
    if (place % size != 0) fault(where(file, line), "misaligned atomic");
    if (options.checked) {
        const bool shared = shared_rank(place) >= 0;
        auto after = ranges.upper_bound(place);
        if (!shared && (after == ranges.begin() || place + size > std::prev(after)->second.end)) {
            fault(where(file, line), "atomic out of bounds");
        }
        const auto published = atomics.find(address);
        if (published != atomics.end()) {
            current->seen = joined({current->seen, published->second});
        }
    }
    if (kind == 'f') return size == 4 ? apply(float()) : apply(double());
    if (kind == 'i') return size == 4 ? apply(int()) : apply(int64_t());
    return size == 4 ? apply(unsigned()) : apply(uint64_t());
}

void emulator_fence() {
    if (options.checked) current->released = snapshot(*current);
}

void emulator_trap(const char* what, const char* file, int line) { fault(where(file, line), what); }

void emulator_wait_for_earlier_kernels_at(const char* file, int line) {
    if (current->touched) {
        fault(where(file, line), "global memory was accessed before this wait for earlier kernels");
    }
}

unsigned emulator_cluster_rank() { return current->rank; }
unsigned emulator_cluster_size() { return static_cast<unsigned>(blocks.size()); }

void emulator_cluster_barrier(bool arrive, bool wait, const char* file, int line) {
    Fiber& self = *current;
    if (arrive) {
        if (self.cluster_generation != cluster_generation) {
            fault(where(file, line), "arrives twice at the cluster barrier");
        }
        ++self.cluster_generation;
        if (++cluster_arrived == static_cast<int>(fibers.size())) {
            cluster_arrived = 0;
            ++cluster_generation;
            std::vector<Fiber*> members;
            for (Fiber& fiber : fibers) members.push_back(&fiber);
            synchronise(members);
            for (Fiber& fiber : fibers) {
                if (fiber.wait == Wait::CLUSTER) make_ready(fiber);
            }
        }
    }
    if (wait && self.cluster_generation != cluster_generation) suspend(Wait::CLUSTER, file, line);
}

void* emulator_cluster_map_at(const void* shared, unsigned rank, const char* file, int line) {
    const int own = current->rank;
    if (rank >= blocks.size()) {
        fault(where(file, line), format("rank %u of a cluster of %zu blocks", rank, blocks.size()));
    }
    if (shared_rank(reinterpret_cast<uintptr_t>(shared)) != own) {
        fault(where(file, line), "maps an address that is not this block's shared memory");
    }
    if (fibers[blocks[rank].first_fiber].done &&
        warp_of(fibers[blocks[rank].first_fiber]).ready == 0) {
        bool gone = true;
        for (const Fiber& fiber : fibers) {
            if (fiber.rank == static_cast<int>(rank)) gone = gone && fiber.done;
        }
        if (gone) {
            fault(
                where(file, line),
                format("reaches into the shared memory of block %u of the cluster, which has left",
                       rank));
        }
    }
    return const_cast<char*>(static_cast<const char*>(shared)) - blocks[own].shared +
           blocks[rank].shared;
}

void emulator_copy_async_at(void* shared, const void* global, int bytes, const char* file,
                            int line) {
    const PendingCopy copy = {shared, global, bytes};
    begin_copy(copy, "asynchronous copy", bytes == 4 || bytes == 8 || bytes == 16, file, line,
               __builtin_return_address(0));
    if (current->copies.empty()) current->copies.emplace_back();
    current->copies.back().push_back(copy);
}

void emulator_copy_async_commit() {
    if (current->copies.empty()) current->copies.emplace_back();
    current->copies.emplace_back();
}

void emulator_copy_async_wait_at(int groups_pending, const char*, int) {
    auto& groups = current->copies;
    while (static_cast<int>(groups.size()) > groups_pending + 1) {
        for (const PendingCopy& copy : groups.front()) {
            check_copy(copy, true, __builtin_return_address(0));
            perform(copy);
        }
        groups.erase(groups.begin());
    }
}

void emulator_mbarrier_init_at(void* barrier, unsigned count, const char* file, int line) {
    if (reinterpret_cast<uintptr_t>(barrier) % 8 != 0 ||
        shared_rank(reinterpret_cast<uintptr_t>(barrier)) != current->rank) {
        fault(where(file, line), "an mbarrier must lie in this block's shared memory, on 8 bytes");
    }
    if (options.checked) check_access(barrier, 8, true, __builtin_return_address(0));
    mbarriers[barrier] = {count, count, 0, 0, 0, {}, nullptr};
}

static Mbarrier& mbarrier_at(void* barrier, const char* file, int line) {
    const auto found = mbarriers.find(barrier);
    if (found == mbarriers.end())
        fault(where(file, line), "an mbarrier that nobody has initialised");
    if (options.checked) check_access(barrier, 8, false, __builtin_return_address(0));
    return found->second;
}

// Copies land only when everybody whose arrival is awaited has arrived.
static void complete(Mbarrier& barrier, void* address, const char* file, int line) {
    if (barrier.pending > 0) return;
    long long bytes = barrier.sent;
    for (const auto& copy : barrier.copies) bytes += copy.copy.bytes;
    if (bytes > barrier.expected) {
        fault(where(file, line),
              format("an mbarrier expects %lld bytes and %lld arrive", barrier.expected, bytes));
    }
    if (bytes < barrier.expected) return;
    Fiber* self = current;
    for (const auto& copy : barrier.copies) {
        current = &fibers[copy.by];
        check_copy(copy.copy, true, __builtin_return_address(0));
        perform(copy.copy);
        if (options.checked) barrier.clock = joined({barrier.clock, snapshot(*current)});
    }
    current = self;
    barrier.copies.clear();
    barrier.expected = 0;
    barrier.sent = 0;
    barrier.pending = barrier.count;
    ++barrier.phase;
    for (Fiber& fiber : fibers) {
        if (fiber.wait == Wait::MBARRIER && fiber.barrier == address) make_ready(fiber);
    }
}

void emulator_mbarrier_arrive_at(void* address, unsigned bytes, const char* file, int line) {
    Mbarrier& barrier = mbarrier_at(address, file, line);
    if (barrier.pending == 0)
        fault(where(file, line), "more arrivals at an mbarrier than its count");
    barrier.expected += bytes;
    --barrier.pending;
    if (options.checked) barrier.clock = joined({barrier.clock, snapshot(*current)});
    const bool awaited = std::any_of(fibers.begin(), fibers.end(), [&](const Fiber& fiber) {
        return fiber.wait == Wait::MBARRIER && fiber.barrier == address;
    });
    // With nothing to copy the phase ends here; otherwise as late as somebody waits for it.
    if (awaited || barrier.expected == 0) complete(barrier, address, file, line);
}

bool emulator_mbarrier_test_at(void* address, unsigned parity, bool wait, const char* file,
                               int line) {
    for (;;) {
        Mbarrier& barrier = mbarrier_at(address, file, line);
        if ((barrier.phase & 1) == (parity & 1)) complete(barrier, address, file, line);
        if ((barrier.phase & 1) != (parity & 1)) {
            if (options.checked && barrier.clock)
                current->seen = joined({current->seen, barrier.clock});
            return true;
        }
        if (!wait) return false;
        current->barrier = address;
        current->parity = parity;
        suspend(Wait::MBARRIER, file, line);
    }
}

void emulator_bulk_copy_at(void* shared, const void* global, int bytes, void* address,
                           const char* file, int line) {
    Mbarrier& barrier = mbarrier_at(address, file, line);
    const PendingCopy copy = {shared, global, bytes};
    begin_copy(copy, "bulk copy", bytes > 0 && bytes % 16 == 0, file, line,
               __builtin_return_address(0));
    barrier.copies.push_back({copy, current->id});
    const bool awaited = std::any_of(fibers.begin(), fibers.end(), [&](const Fiber& fiber) {
        return fiber.wait == Wait::MBARRIER && fiber.barrier == address;
    });
    if (awaited) complete(barrier, address, file, line);
}

void emulator_prefetch_at(const void* global, int bytes, const char* file, int line) {
    const auto from = reinterpret_cast<uintptr_t>(global);
    if (bytes <= 0 || bytes >= 1 << 20 || bytes % 16 != 0 || from % 16 != 0) {
        fault(where(file, line),
              format("prefetch of %d bytes at address ...%03zx: not allowed", bytes, from & 0xfff));
    }
    if (options.checked) check_access(global, bytes, false, __builtin_return_address(0));
    prefetched_bytes += bytes;
}

// The value lands at once; who reads it without waiting for the mbarrier is in a race.
void emulator_cluster_send_at(void* shared, const void* value, int bytes, void* address,
                              const char* file, int line) {
    Mbarrier& barrier = mbarrier_at(address, file, line);
    if (options.checked) {
        check_access(shared, bytes, true, __builtin_return_address(0));
        barrier.clock = joined({barrier.clock, snapshot(*current)});
    }
    memcpy(shared, value, bytes);
    barrier.sent += bytes;
    const bool awaited = std::any_of(fibers.begin(), fibers.end(), [&](const Fiber& fiber) {
        return fiber.wait == Wait::MBARRIER && fiber.barrier == address;
    });
    if (awaited) complete(barrier, address, file, line);
}

// What the instrumentation of -fsanitize=thread calls.

#define EMULATOR_ACCESS(SIZE)                                            \
    void __tsan_read##SIZE(void* address) {                              \
        check_access(address, SIZE, false, __builtin_return_address(0)); \
    }                                                                    \
    void __tsan_write##SIZE(void* address) {                             \
        check_access(address, SIZE, true, __builtin_return_address(0));  \
    }                                                                    \
    void __tsan_unaligned_read##SIZE(void* address) {                    \
        check_access(address, SIZE, false, __builtin_return_address(0)); \
    }                                                                    \
    void __tsan_unaligned_write##SIZE(void* address) {                   \
        check_access(address, SIZE, true, __builtin_return_address(0));  \
    }                                                                    \
    void __tsan_volatile_read##SIZE(void* address) {                     \
        check_access(address, SIZE, false, __builtin_return_address(0)); \
    }                                                                    \
    void __tsan_volatile_write##SIZE(void* address) {                    \
        check_access(address, SIZE, true, __builtin_return_address(0));  \
    }
EMULATOR_ACCESS(1)
EMULATOR_ACCESS(2)
EMULATOR_ACCESS(4)
EMULATOR_ACCESS(8)
EMULATOR_ACCESS(16)
void __tsan_read_range(void* address, unsigned long bytes) {
    check_access(address, bytes, false, __builtin_return_address(0));
}
void __tsan_write_range(void* address, unsigned long bytes) {
    check_access(address, bytes, true, __builtin_return_address(0));
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

// What the instrumentation of -fsanitize=undefined calls; the layouts are the compiler's.

struct UbsanLine {
    const char* file;
    unsigned line, column;
};
struct UbsanType {
    unsigned short kind, info;
    char name[1];
};
struct UbsanMismatch {
    UbsanLine line;
    UbsanType* type;
    unsigned char log_alignment, check;
};
struct UbsanData {
    UbsanLine line;
    UbsanType* type;
    UbsanType* index_type;
};

void __ubsan_handle_type_mismatch_v1(UbsanMismatch* data, uintptr_t address) {
    const unsigned alignment = 1u << data->log_alignment;
    if (address == 0) fault(where(data->line.file, data->line.line), "a null pointer is followed");
    fault(where(data->line.file, data->line.line),
          format("misaligned access to %s: address ...%03zx is not on %u bytes", data->type->name,
                 static_cast<size_t>(address & 0xfff), alignment));
}
void __ubsan_handle_out_of_bounds(UbsanData* data, uintptr_t index) {
    fault(
        where(data->line.file, data->line.line),
        format("index %lld out of bounds for %s", static_cast<long long>(index), data->type->name));
}
#define EMULATOR_OVERFLOW(NAME, WHAT)                                                  \
    void __ubsan_handle_##NAME##_overflow(UbsanData* data, uintptr_t a, uintptr_t b) { \
        fault(where(data->line.file, data->line.line),                                 \
              format("overflow of %s in %s of %lld and %lld", data->type->name, WHAT,  \
                     static_cast<long long>(static_cast<int>(a)),                      \
                     static_cast<long long>(static_cast<int>(b))));                    \
    }
EMULATOR_OVERFLOW(add, "the sum")
EMULATOR_OVERFLOW(sub, "the difference")
EMULATOR_OVERFLOW(mul, "the product")
EMULATOR_OVERFLOW(divrem, "the quotient")
void __ubsan_handle_negate_overflow(UbsanData* data, uintptr_t) {
    fault(where(data->line.file, data->line.line), "overflow in a negation");
}
void __ubsan_handle_shift_out_of_bounds(UbsanData* data, uintptr_t, uintptr_t by) {
    fault(where(data->line.file, data->line.line),
          format("shift by %lld", static_cast<long long>(by)));
}

// What Python calls.

void emulator_set_variables(int count, const unsigned long long* offsets,
                            const unsigned long long* sizes, const char* const* names) {
    variables.clear();
    for (int i = 0; i < count; ++i) variables[offsets[i]] = {sizes[i], names[i]};
}

void emulator_add_range(const void* begin, size_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(begin);
    ranges[address] = {address, address + bytes, "", {}};
}
void emulator_remove_range(const void* begin) { ranges.erase(reinterpret_cast<uintptr_t>(begin)); }

size_t emulator_prefetched() { return std::exchange(prefetched_bytes, 0); }

// 0: well; 1: `report` holds the fault.
int emulator_launch(const EmulatorKernel* what, const EmulatorDynamic* dynamic, int dynamics,
                    void* anchor, const unsigned* grid, const unsigned* block, unsigned shared,
                    const void* arguments, int schedule, unsigned seed, int checked, char* report,
                    size_t capacity) {
    kernel = what;
    dynamic_arrays = dynamic;
    dynamic_count = dynamics;
    module_anchor = reinterpret_cast<char* (*)()>(anchor);
    packed = arguments;
    options = {schedule, seed, checked};
    shared_bytes = shared;
    failed = false;
    message.clear();
    images.clear();
    if (!blocks.empty()) blocks[0].shared = nullptr;
    random_numbers.seed(seed);
    first_cluster = cluster_serial + 1;
    atomics.clear();
    const dim3 grid_dim(grid[0], grid[1], grid[2]), block_dim(block[0], block[1], block[2]);
    const unsigned long long count =
        static_cast<unsigned long long>(grid[0]) * grid[1] * grid[2] / kernel->cluster_size;
    std::vector<unsigned long long> order(count);
    for (unsigned long long i = 0; i < count; ++i) order[i] = i;
    if (schedule == 1) std::reverse(order.begin(), order.end());
    if (schedule == 2) std::shuffle(order.begin(), order.end(), random_numbers);

    const unsigned control = _mm_getcsr();
    flush_subnormals();
    const SignalStack signal_stack;
    struct sigaction action = {}, old_segv, old_bus, old_fpe;
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &old_segv);
    sigaction(SIGBUS, &action, &old_bus);
    sigaction(SIGFPE, &action, &old_fpe);
    for (const unsigned long long cluster : order) {
        run_cluster(grid_dim, block_dim, cluster * kernel->cluster_size);
        if (failed) break;
    }
    sigaction(SIGSEGV, &old_segv, nullptr);
    sigaction(SIGBUS, &old_bus, nullptr);
    sigaction(SIGFPE, &old_fpe, nullptr);
    _mm_setcsr(control);
    emulator_thread = nullptr;
    current = nullptr;
    if (!failed) return 0;
    snprintf(report, capacity, "%s", message.c_str());
    return 1;
}
}
