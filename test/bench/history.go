//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"agentctl/control"
	"agentctl/prober"
	"agentctl/prober/history"
)

// The board's history: what a query costs the daemon, what a person's commands leave behind, and
// what a day of recording writes to flash.

// seededHours is how much history the measured board begins with, so that queries over a day
// read a day.
const seededHours = 25

// recording is a store of history with a simulated clock, which runs as fast as the disk allows.
type recording struct {
	*history.Store
	now      int64 // ms
	readings []prober.Reading
	seconds  int
}

func openRecording(path string, begin time.Time) (*recording, error) {
	r := &recording{now: begin.UnixMilli()}
	for _, s := range prober.Sensors() {
		if s.Record.ID != 0 && len(r.readings) < 7 { // what a board with all modules has
			r.readings = append(r.readings, prober.Reading{Key: s.Key, Value: 1})
		}
	}
	var err error
	r.Store, err = history.Open(history.Options{Path: path, Now: func() (int64, bool) { return r.now, true },
		BootID: "bench", Mono: func() time.Duration { return time.Duration(r.seconds) * time.Second }})
	return r, err
}

// record adds n seconds and commits them, as the daemon does each minute.
func (r *recording) record(ctx context.Context, n int) error {
	for range n {
		r.seconds++
		r.now += 1000
		s := prober.Sample{TSMS: r.now, CPUPct: float64(r.seconds % 100), MemBytes: 1<<30 + uint64(r.seconds), MemTotalBytes: 8 << 30, DiskPct: 31.2, Load1: 0.42, Load5: 0.39, Load15: 0.35,
			Mono: time.Duration(r.seconds) * time.Second}
		if r.seconds%10 == 0 {
			r.Add(s, r.readings...)
		} else {
			r.Add(s)
		}
	}
	return r.Flush(ctx)
}

// seedHistory makes a history of a sample a second for the last hours.
func seedHistory(ctx context.Context, path string, hours int) error {
	r, err := openRecording(path, time.Now().Add(-time.Duration(hours)*time.Hour))
	if err != nil {
		return err
	}
	for range hours * 6 {
		if err = r.record(ctx, 600); err != nil {
			break
		}
	}
	return errors.Join(err, r.Close())
}

// boardCommand runs a command of the board build against the measured daemon.
func (b *bench) boardCommand(args ...string) (string, error) {
	return output(b.ctx, b.board, append(args, "--socket", b.boardSocket())...)
}

// queryBars measures the daemon's CPU for the history of a day in steps of a minute.
func (b *bench) queryBars(agent *process) error {
	for _, query := range []struct {
		name              string
		args              []string
		required, stretch float64
	}{
		{"two modules", []string{"--modules", "cpu,memory"}, 15, 8},
		{"all modules", nil, 40, 20},
	} {
		var cpu []float64
		for range max(b.rounds, b.count) {
			before := agent.cpu()
			out, err := b.boardCommand(append([]string{"history", "--since", "24h", "--step", "60s", "-o", "ndjson"}, query.args...)...)
			if err != nil {
				return err
			}
			cpu = append(cpu, (agent.cpu()-before).Seconds()*1000)
			if n := strings.Count(out, "\n"); n < 1400 {
				return fmt.Errorf("the history of a day in minutes has %d rows", n)
			}
		}
		fmt.Printf("24 h history at 60 s, %s: %s ms of CPU\n", query.name, list(cpu, "%.1f"))
		b.report.add(bar{name: "device daemon: 24 h history at 60 s, " + query.name + ": CPU", measured: median(cpu), required: query.required, stretch: query.stretch, format: "%.1f ms"})
	}
	return b.aggregateBar(agent)
}

// aggregateBar measures the daemon's CPU for the mean of a day as one value, which a question about a
// whole fleet asks of every board. The tool is called over the control socket.
func (b *bench) aggregateBar(agent *process) error {
	c, err := control.Dial(b.ctx, b.boardSocket())
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	var offered struct {
		NodeID string `json:"node_id"`
	}
	if err := c.Capabilities(b.ctx, &offered); err != nil {
		return err
	}
	tool := "syshist." + offered.NodeID + ".history.query"
	var cpu []float64
	for range max(b.rounds, b.count) {
		b.sleep(500 * time.Millisecond) // it serves five questions a second
		now := time.Now().UnixMilli()
		args := fmt.Appendf(nil, `{"from_ms":%d,"to_ms":%d,"step_ms":%d,"metrics":["cpu_pct","mem_bytes","disk_pct","temperature.hottest_c"],"aggregate":"mean"}`,
			now-24*3600*1000, now, 24*3600*1000)
		before := agent.cpu()
		answer, err := c.CallTool(b.ctx, tool, args)
		if err != nil {
			return err
		}
		cpu = append(cpu, (agent.cpu()-before).Seconds()*1000)
		if !strings.Contains(string(answer), `"temperature.hottest_c":[1]`) {
			return fmt.Errorf("the mean of a day: %.200s", answer)
		}
	}
	fmt.Printf("24 h as one value, four metrics: %s ms of CPU\n", list(cpu, "%.1f"))
	b.report.add(bar{name: "device daemon: 24 h aggregated into one value, four metrics: CPU", measured: median(cpu), required: 25, format: "%.1f ms"})
	return nil
}

// hourOfCommands runs, one after another, the commands that a person may type in an hour: 60 times
// status, 20 charts, 4 exports of a day, and 10 times watch for a few seconds.
func (b *bench) hourOfCommands() error {
	for i := range 60 {
		commands := [][]string{{"status"}}
		if i%3 == 0 {
			commands = append(commands, []string{"history"})
		}
		if i%6 == 0 {
			commands = append(commands, []string{"watch", "-o", "ndjson", "--for", "3s"})
		}
		if i%15 == 0 {
			commands = append(commands, []string{"history", "--since", "24h", "-o", "csv"})
		}
		for _, c := range commands {
			if _, err := b.boardCommand(c...); err != nil {
				return err
			}
		}
	}
	return nil
}

// flashBar records a day on a new ext4 file system, in as many commits as a day has, and
// reads from the kernel what the device was written.
func (b *bench) flashBar() error {
	if b.isQuick {
		b.report.absent("flash a day on ext4", errors.New("left out of a quick run"))
		return nil
	}
	dir, device, unmount, err := b.loopExt4()
	if err != nil {
		b.report.absent("flash a day on ext4", err)
		return nil
	}
	defer unmount()
	r, err := openRecording(filepath.Join(dir, "history.db"), time.Now().Add(-24*time.Hour))
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	root, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	sync := func() error { return unix.Syncfs(int(root.Fd())) } // the kernel would have minutes to
	if err := errors.Join(r.record(b.ctx, 60), sync()); err != nil {
		return err
	}
	before, err := deviceWrites(device)
	if err != nil {
		return err
	}
	const day = 24 * 60
	for range day {
		if err := errors.Join(r.record(b.ctx, 60), sync()); err != nil {
			return err
		}
	}
	after, err := deviceWrites(device)
	if err != nil {
		return err
	}
	b.report.add(bar{name: "history: written to the device a day, ext4, all modules", measured: (after - before) / 1e6, required: 75, format: "%.1f MB"})
	return nil
}

// loopExt4 mounts a new file system on a loop device.
func (b *bench) loopExt4() (dir, device string, unmount func(), err error) {
	image := filepath.Join(b.dir, b.newName("ext4"))
	dir = image + ".mount"
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 256<<20), os.Mkdir(dir, 0o700)); err != nil {
		return "", "", nil, err
	}
	// The inode tables are written now, not by the kernel while something is measured.
	if _, err := output(b.ctx, "mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", image); err != nil {
		return "", "", nil, err
	}
	out, err := output(b.ctx, "losetup", "-f", "--show", image)
	if err != nil {
		return "", "", nil, fmt.Errorf("needs root and loop devices: %w", err)
	}
	device = strings.TrimSpace(out)
	detach := func() { _ = exec.Command("losetup", "-d", device).Run() }
	if err := unix.Mount(device, dir, "ext4", 0, ""); err != nil {
		detach()
		return "", "", nil, fmt.Errorf("mount %s: %w", device, err)
	}
	return dir, device, func() { _ = unix.Unmount(dir, 0); detach() }, nil
}

// deviceWrites is how many bytes a block device was written.
func deviceWrites(device string) (float64, error) {
	data, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(device), "stat"))
	if err != nil {
		return 0, err
	}
	var sectors float64
	fields := strings.Fields(string(data))
	if len(fields) < 7 {
		return 0, fmt.Errorf("%s: %q", device, data)
	}
	_, err = fmt.Sscan(fields[6], &sectors)
	return sectors * 512, err
}
