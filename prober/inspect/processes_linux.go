package inspect

import (
	"bytes"
	"cmp"
	"context"
	"math"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The processes that use most, from two readings of /proc/PID/stat. CPU use is a difference: one
// reading has the CPU time since a process started, which says nothing about the present. Where
// processes of other users are hidden from the daemon (SeesProcesses), remote.go asks a helper.

// ticksPerSecond is the unit of CPU times in /proc, USER_HZ, which is 100 on all platforms of Go.
const ticksPerSecond = 100

// pageSize is the unit of the resident memory in /proc.
var pageSize = uint64(os.Getpagesize())

// procStat is one reading of /proc/PID/stat. There may be 100,000 of them in memory at a time.
type procStat struct {
	pid, ppid, threads int
	ticks              uint64        // CPU time used so far, in ticks
	start              uint64        // when the process started, in ticks since boot
	rss                uint64        // resident memory, in pages
	at                 time.Duration // when it was read, since statReader.begin
	state              byte          // as in stat: 'R', 'S' and others
	name               string
}

// parseStat parses /proc/PID/stat (proc(5)). The name is in parentheses and may contain any byte,
// also parentheses; all other fields are numbers, but for the state. want selects processes by name,
// nil for all: a name that it refuses is not copied, which saves memory. A line that is cut before
// field 24 has ok false.
func parseStat(b []byte, want func(name []byte) bool) (s procStat, wanted, ok bool) {
	// The last parenthesis ends the name: no field after it has one.
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open || end+2 >= len(b) {
		return s, false, false
	}
	s.pid, ok = parseInt(bytes.TrimSpace(b[:open]))
	if !ok {
		return s, false, false
	}
	if name := b[open+1 : end]; want == nil || want(name) {
		s.name, wanted = string(name), true
	}
	s.state = b[end+2]
	field := 3 // as proc(5) counts: the state
	for rest := b[end+2:]; len(rest) > 0 && field <= 24; field++ {
		var word []byte
		word, rest, _ = bytes.Cut(rest, []byte(" "))
		n, isNumber := parseUint(bytes.TrimSpace(word))
		switch field {
		case 4:
			s.ppid = int(min(n, math.MaxInt32))
		// User and kernel time of the process itself, without those of its children.
		case 14, 15:
			s.ticks += n
		case 20:
			s.threads = int(min(n, math.MaxInt32))
		case 22:
			s.start = n
		case 24:
			s.rss = n // the kernel shows negative values now and then: they count as 0
			return s, wanted, isNumber || len(word) > 0
		}
	}
	return s, false, false
}

// parseUint parses digits; 0 and false for anything else.
func parseUint(b []byte) (uint64, bool) {
	n, err := strconv.ParseUint(string(b), 10, 64)
	if err != nil {
		return 0, false
	}
	return n, true
}

// parseInt parses the digits of a process id.
func parseInt(b []byte) (int, bool) {
	n, ok := parseUint(b)
	return int(n), ok && n <= math.MaxInt32
}

// memBytes is the resident memory in bytes.
func (s *procStat) memBytes() uint64 { return min(s.rss, maxCount/pageSize) * pageSize }

// statReader reads /proc/PID/stat of many processes, each with three system calls. It has one
// buffer, so it belongs to one goroutine. It opens files relative to proc, so that the kernel looks up
// only the rest of the path.
type statReader struct {
	proc  int                    // descriptor of /proc
	begin time.Time              // of the answer: procStat.at counts from here
	buf   [1024]byte             // one stat; reused
	want  func(name []byte) bool // see parseStat
}

// newReader opens /proc.
func (m *Machine) newReader(begin time.Time, want func(name []byte) bool) (*statReader, error) {
	proc, err := unix.Open(m.path("proc"), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_DIRECTORY, 0)
	return &statReader{proc: proc, begin: begin, want: want}, err
}

func (r *statReader) close() { _ = unix.Close(r.proc) }

// read reads one process. wanted is the result of want; ok is false if the process has ended. One
// read call is enough: the fields up to the 24th are within the first 1 KiB.
func (r *statReader) read(pid string) (s procStat, wanted, ok bool) {
	fd, err := unix.Openat(r.proc, pid+"/stat", unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return s, false, false
	}
	n, err := unix.Read(fd, r.buf[:])
	_ = unix.Close(fd)
	if err != nil || n <= 0 {
		return s, false, false
	}
	s, wanted, ok = parseStat(r.buf[:n], r.want)
	s.at = time.Since(r.begin)
	return s, wanted, ok
}

// nameContains returns the filter for ProcessQuery.Name.
func nameContains(text string) func([]byte) bool {
	if text == "" {
		return nil
	}
	text = strings.ToLower(text)
	return func(name []byte) bool { return strings.Contains(strings.ToLower(string(name)), text) }
}

// processScan is the first reading of all processes.
type processScan struct {
	total int
	found []procStat // those that the query selects
	isCut bool       // the time was up before all were read
}

// cpuUse is a process with the CPU time that it used within the window. An unknown one sorts after
// all others.
type cpuUse struct {
	procStat
	pct float64 // of one processor; -1: unknown
}

// Processes returns the processes that use most CPU time or memory. An answer takes three steps:
//
//	scan       reads all processes
//	measure    waits for the window and reads them again: the difference is their CPU time
//	details    reads users and command lines of the processes of the answer
//
// If the query sorts by memory, measure reads only the processes of the answer again. A process that
// ends between the steps is left out. So is one whose number was given to another process, which has
// another start time.
func (m *Machine) Processes(ctx context.Context, q ProcessQuery) Processes {
	out := Processes{Processes: []Process{}}
	var all processScan
	begin := time.Now()
	out.Unfinished = collect(ctx, &m.guard, &all, part[processScan]{"processes", func(ctx context.Context) func(*processScan) { return m.scan(ctx, begin, &q) }})
	if len(out.Unfinished) > 0 {
		return out
	}
	if all.isCut {
		out.Unfinished = []string{"processes"}
	}
	out.Total, out.Matching = all.total, len(all.found)
	byMemory := func(a, b procStat) int { return cmp.Or(cmp.Compare(b.rss, a.rss), cmp.Compare(a.pid, b.pid)) }
	// The order by memory is known after one reading, so only the answer's processes are read again.
	if q.SortBy == "memory" {
		slices.SortFunc(all.found, byMemory)
		all.found = pageOf(all.found, 0, q.Limit)
	}
	second := m.measure(ctx, begin, all.found, q.Window)
	out.WindowMS = second.elapsed.Milliseconds()
	if second.isCut {
		out.Unfinished = append(out.Unfinished, "cpu")
	}
	// CPU use is known after the second reading, of all that match. Of equal ones, which are mostly
	// idle, those with more memory come first.
	if q.SortBy != "memory" {
		slices.SortFunc(second.alive, func(a, b cpuUse) int {
			return cmp.Or(cmp.Compare(b.pct, a.pct), byMemory(a.procStat, b.procStat))
		})
	}
	chosen := pageOf(second.alive, 0, q.Limit)
	for _, c := range chosen {
		p := Process{PID: c.pid, PPID: c.ppid, Name: Text(c.name, maxName), State: stateName(c.state), MemBytes: c.memBytes(), Threads: c.threads}
		if c.pct >= 0 {
			pct := math.Round(c.pct*10) / 10
			p.CPUPct = &pct
		}
		out.Processes = append(out.Processes, p)
	}
	if !m.details(ctx, out.Processes, chosen, q.Args) {
		out.Unfinished = append(out.Unfinished, "details")
	}
	return out
}

// withShare returns a context that ends after a share of the time that ctx has left without reserved:
// the steps of an answer divide the time of the caller, so that a machine with very many processes
// still gets an answer. Without a deadline it returns ctx. If less than reserved is left, the context
// that it returns has ended.
func withShare(ctx context.Context, share float64, reserved time.Duration) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, time.Duration(share*float64(time.Until(deadline)-reserved)))
}

// scan reads all processes in at most two fifths of the time without the window. The second reading
// and the details have the rest. If ctx itself ends, the part is unfinished and the answer has no
// processes.
func (m *Machine) scan(ctx context.Context, begin time.Time, q *ProcessQuery) func(*processScan) {
	limit, cancel := withShare(ctx, 0.4, q.Window)
	defer cancel()
	r, err := m.newReader(begin, nameContains(q.Name))
	if err != nil {
		return nil
	}
	defer r.close()
	var c processScan
	err = m.eachPID(ctx, func(pid string) bool {
		c.total++
		// One check for 64 processes, which take 192 system calls.
		if c.isCut = c.isCut || c.total%64 == 0 && limit.Err() != nil; c.isCut {
			return true // from here on, processes are counted and not read
		}
		s, wanted, ok := r.read(pid)
		switch {
		case !ok:
			c.total-- // it has ended
		case wanted:
			c.found = append(c.found, s)
		}
		return true
	})
	if err != nil {
		return nil
	}
	return func(out *processScan) { *out = c }
}

// measurement is the second reading of processes.
type measurement struct {
	alive   []cpuUse      // those that have not ended
	elapsed time.Duration // between the two readings of the first process
	isCut   bool          // the time was up: some or all processes have no CPU time
}

// measure waits for the window and reads the processes of list again. If ctx ends before, the
// processes are those of the first reading without CPU time. A late goroutine may still read list,
// so the caller must not change it afterwards.
func (m *Machine) measure(ctx context.Context, begin time.Time, list []procStat, window time.Duration) measurement {
	var out measurement
	late := collect(ctx, &m.guard, &out, part[measurement]{"cpu", func(ctx context.Context) func(*measurement) {
		select {
		case <-time.After(window):
		case <-ctx.Done():
			return nil
		}
		got, err := m.readAgain(ctx, begin, list)
		if err != nil {
			return nil
		}
		return func(out *measurement) { *out = got }
	}})
	if len(late) == 0 {
		return out
	}
	out = measurement{isCut: true}
	for _, s := range list {
		out.alive = append(out.alive, cpuUse{s, -1})
	}
	return out
}

// readAgain is the second reading. It leaves a fifth of the time that is left to the details. Each
// process has its own window, from its first reading to its second: in a scan of 100,000 processes
// the windows of the first and the last do not begin together.
func (m *Machine) readAgain(ctx context.Context, begin time.Time, list []procStat) (out measurement, err error) {
	limit, cancel := withShare(ctx, 0.8, 0)
	defer cancel()
	r, err := m.newReader(begin, func([]byte) bool { return false })
	if err != nil {
		return out, err
	}
	defer r.close()
	out.alive = make([]cpuUse, 0, len(list))
	for i, old := range list {
		if out.isCut = out.isCut || i%64 == 63 && limit.Err() != nil; out.isCut {
			out.alive = append(out.alive, cpuUse{old, -1})
			continue
		}
		now, _, ok := r.read(strconv.Itoa(old.pid))
		if !ok || now.start != old.start {
			continue // ended, or another process with its number
		}
		if out.elapsed == 0 {
			out.elapsed = now.at - old.at
		}
		// ticks are unsigned: without max, a counter that went back would give a huge number.
		used := float64(max(now.ticks, old.ticks)-old.ticks) / ticksPerSecond
		// This reader's want copies no names.
		now.name = old.name
		out.alive = append(out.alive, cpuUse{now, 100 * used / (now.at - old.at).Seconds()})
	}
	return out, nil
}

// details adds user, start time and command line to list, which has the same processes as chosen. It
// returns false, and adds nothing, if ctx ended before. Command lines and users are read for the
// answer's processes only: each takes one or two more files.
func (m *Machine) details(ctx context.Context, list []Process, chosen []cpuUse, withArgs bool) bool {
	type detail struct {
		user, args string
		started    int64
	}
	var out []detail
	late := collect(ctx, &m.guard, &out, part[[]detail]{"details", func(ctx context.Context) func(*[]detail) {
		boot, hasBoot := m.bootMS()
		users := make(map[string]string)
		got := make([]detail, len(chosen))
		for i, c := range chosen {
			if ctx.Err() != nil {
				return nil
			}
			dir := m.path("proc", strconv.Itoa(c.pid))
			got[i].user = m.userOf(ctx, dir, users)
			if hasBoot {
				// The bounds of start keep the product within 64 bits, whatever a file below
				// Options.Root has.
				got[i].started = max(boot+int64(min(c.start, 1<<40))*1000/ticksPerSecond, 0)
			}
			if withArgs {
				b, _ := readFile(dir+"/cmdline", 4*maxArgs)
				got[i].args = Text(string(bytes.ReplaceAll(b, []byte{0}, []byte{' '})), maxArgs)
			}
		}
		return func(out *[]detail) { *out = got }
	}})
	for i := range out {
		list[i].User, list[i].Args, list[i].StartedMS = out[i].user, out[i].args, out[i].started
	}
	return len(late) == 0
}

// bootMS is the time at which the machine started, in milliseconds since 1970 by Options.Now. It
// moves with the clock: after a step of the clock, the same process has another start time.
func (m *Machine) bootMS() (int64, bool) {
	now, ok := m.opt.now()
	word, _, _ := strings.Cut(readText(m.path("proc/uptime"), maxName), " ")
	uptime, err := strconv.ParseFloat(word, 64)
	return now - int64(uptime*1000), ok && err == nil && uptime >= 0 && uptime < 1e10
}

// userOf returns the name of a process's effective user, or the number of a user without a name. dir
// is the process's directory in /proc; names caches names by number. Without cgo, os/user reads
// /etc/passwd only: users of LDAP and the like appear by number.
func (m *Machine) userOf(ctx context.Context, dir string, names map[string]string) string {
	uid := ""
	_ = eachLine(ctx, dir+"/status", func(line []byte) bool {
		if rest, ok := bytes.CutPrefix(line, []byte("Uid:")); ok {
			if f := bytes.Fields(rest); len(f) >= 2 {
				uid = Text(string(f[1]), 32)
			}
			return false
		}
		return true
	})
	if uid == "" {
		return ""
	}
	name, known := names[uid]
	if !known {
		name = uid
		if u, err := user.LookupId(uid); err == nil {
			name = Text(u.Username, 32)
		}
		names[uid] = name
	}
	return name
}

// stateName returns the word for a state of proc(5).
func stateName(c byte) string {
	switch c {
	case 'R':
		return "running"
	case 'S':
		return "sleeping"
	case 'D':
		return "blocked"
	case 'T', 't':
		return "stopped"
	case 'Z':
		return "zombie"
	case 'I':
		return "idle"
	}
	return "other"
}
