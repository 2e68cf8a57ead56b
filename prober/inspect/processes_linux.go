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

// ticksPerSecond is the unit of CPU times in /proc, USER_HZ, which is 100 on all platforms of Go.
const ticksPerSecond = 100

// pageSize is the unit of the resident memory in /proc.
var pageSize = uint64(os.Getpagesize())

// procStat is what /proc/PID/stat has of a process.
type procStat struct {
	pid, ppid, threads int
	ticks, start       uint64        // CPU time used, and when it began after the start of the machine
	rss                uint64        // pages
	at                 time.Duration // when it was read, after reader.begin
	state              byte
	name               string
}

// parseStat parses /proc/PID/stat (proc(5)). name is the only text in it; it is in parentheses
// and may contain any byte, also parentheses. want selects by name, nil for all; what it refuses has
// no name in the result and costs no memory for it.
func parseStat(b []byte, want func(name []byte) bool) (s procStat, wanted, ok bool) {
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
		case 14, 15:
			s.ticks += n
		case 20:
			s.threads = int(min(n, math.MaxInt32))
		case 22:
			s.start = n
		case 24:
			s.rss = n // negative for a moment now and then: counts as 0
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

// memBytes is the resident memory.
func (s *procStat) memBytes() uint64 { return min(s.rss, maxCount/pageSize) * pageSize }

// reader reads /proc/PID/stat of many processes, each with three system calls.
type reader struct {
	proc  int // descriptor of /proc
	begin time.Time
	buf   [1024]byte
	want  func(name []byte) bool
}

// newReader opens /proc.
func (m *Machine) newReader(begin time.Time, want func(name []byte) bool) (*reader, error) {
	proc, err := unix.Open(m.path("proc"), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_DIRECTORY, 0)
	return &reader{proc: proc, begin: begin, want: want}, err
}

func (r *reader) close() { _ = unix.Close(r.proc) }

// read reads one process; ok is false if it has ended.
func (r *reader) read(pid string) (s procStat, wanted, ok bool) {
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

// contains returns a function that finds a text in names, in either case.
func contains(text string) func([]byte) bool {
	if text == "" {
		return nil
	}
	text = strings.ToLower(text)
	return func(name []byte) bool { return strings.Contains(strings.ToLower(string(name)), text) }
}

// census is what a reading of all processes found.
type census struct {
	total int
	found []procStat // those that the query selects
	isCut bool       // the time was over before all were read
}

// measured is a process with the CPU time that it used within the window.
type measured struct {
	procStat
	pct float64 // of one processor; -1: not known
}

// Processes returns the processes that use most.
//
// To find those that use most CPU, all are read twice; for memory, all once and those of the answer
// twice. A process that ends meanwhile is left out; one that took another's number has another start
// and is no longer the same.
func (m *Machine) Processes(ctx context.Context, q ProcessQuery) Processes {
	out := Processes{Processes: []Process{}}
	var all census
	begin := time.Now()
	out.Unfinished = collect(ctx, &m.guard, &all, part[census]{"processes", func(ctx context.Context) func(*census) { return m.census(ctx, begin, &q) }})
	if len(out.Unfinished) > 0 {
		return out
	}
	if all.isCut {
		out.Unfinished = []string{"processes"}
	}
	out.Total, out.Matching = all.total, len(all.found)
	byMemory := func(a, b procStat) int { return cmp.Or(cmp.Compare(b.rss, a.rss), cmp.Compare(a.pid, b.pid)) }
	if q.SortBy == "memory" {
		slices.SortFunc(all.found, byMemory)
		all.found = window(all.found, 0, q.Limit)
	}
	chosen, elapsed, isMeasured := m.measure(ctx, begin, all.found, q.Window)
	out.WindowMS = elapsed.Milliseconds()
	if !isMeasured {
		out.Unfinished = append(out.Unfinished, "cpu")
	}
	if q.SortBy != "memory" {
		slices.SortFunc(chosen, func(a, b measured) int {
			return cmp.Or(cmp.Compare(b.pct, a.pct), byMemory(a.procStat, b.procStat))
		})
	}
	chosen = window(chosen, 0, q.Limit)
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

// census reads all processes in two fifths of the time that is left beside the window at most, so
// that the second reading and the details have the rest.
func (m *Machine) census(ctx context.Context, begin time.Time, q *ProcessQuery) func(*census) {
	limit := ctx
	if deadline, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		limit, cancel = context.WithTimeout(ctx, max((time.Until(deadline)-q.Window)*2/5, 0))
		defer cancel()
	}
	r, err := m.newReader(begin, contains(q.Name))
	if err != nil {
		return nil
	}
	defer r.close()
	var c census
	err = m.eachPID(ctx, func(pid string) bool {
		c.total++
		if c.isCut = c.isCut || c.total%64 == 0 && limit.Err() != nil; c.isCut {
			return true // only counted
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
	return func(out *census) { *out = c }
}

// measure waits for the window and reads the processes again; elapsed is the time between the two
// readings of the first one. Those that have ended are not in the result. Without time for all of
// them, the rest has no CPU time and isMeasured is false.
func (m *Machine) measure(ctx context.Context, begin time.Time, list []procStat, window time.Duration) (alive []measured, elapsed time.Duration, isMeasured bool) {
	type result struct {
		alive   []measured
		elapsed time.Duration
		isCut   bool
	}
	var out result
	late := collect(ctx, &m.guard, &out, part[result]{"cpu", func(ctx context.Context) func(*result) {
		timer := time.NewTimer(window)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return nil
		}
		limit := ctx
		if deadline, ok := ctx.Deadline(); ok { // the details need some of the time
			var cancel context.CancelFunc
			limit, cancel = context.WithTimeout(ctx, time.Until(deadline)*4/5)
			defer cancel()
		}
		r, err := m.newReader(begin, func([]byte) bool { return false })
		if err != nil {
			return nil
		}
		defer r.close()
		got := result{alive: make([]measured, 0, len(list))}
		for i, old := range list {
			if got.isCut = got.isCut || i%64 == 63 && limit.Err() != nil; got.isCut {
				got.alive = append(got.alive, measured{old, -1})
				continue
			}
			now, _, ok := r.read(strconv.Itoa(old.pid))
			if !ok || now.start != old.start {
				continue
			}
			if got.elapsed == 0 {
				got.elapsed = now.at - old.at
			}
			used := float64(max(now.ticks, old.ticks)-old.ticks) / ticksPerSecond
			now.name = old.name
			got.alive = append(got.alive, measured{now, 100 * used / (now.at - old.at).Seconds()})
		}
		return func(out *result) { *out = got }
	}})
	if len(late) == 0 {
		return out.alive, out.elapsed, !out.isCut
	}
	for _, s := range list {
		alive = append(alive, measured{s, -1})
	}
	return alive, 0, false
}

// details adds users, times and arguments to list, whose processes are chosen; false if the time did
// not suffice.
func (m *Machine) details(ctx context.Context, list []Process, chosen []measured, withArgs bool) bool {
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

// bootMS is when the machine started, by the clock of the answers.
func (m *Machine) bootMS() (int64, bool) {
	now, ok := m.opt.now()
	word, _, _ := strings.Cut(readText(m.path("proc/uptime"), maxName), " ")
	uptime, err := strconv.ParseFloat(word, 64)
	return now - int64(uptime*1000), ok && err == nil && uptime >= 0 && uptime < 1e10
}

// userOf is the name of a process's effective user, or its number. names is a cache.
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

// stateName is the state of a process in a word.
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
