package sandbox

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// launcherName is the name (argv[0]) of a process that restricts itself and executes a
// program.
const launcherName = "agentctl-plugin-launcher"

// startTimeout bounds the time from the start of the launcher to that of the program.
const startTimeout = 10 * time.Second

// reportFD is the descriptor on which a launcher reports an error. It closes when the program
// is executed.
const reportFD = 3

// Command returns a command that runs the executable path with arguments under the policy. The caller may set
// everything but ExtraFiles, and starts it with Start.
func Command(p Policy, path string, args ...string) *exec.Cmd {
	p.MaxTasks = ownTasks() + cmp.Or(p.MaxTasks, maxTasks)
	policy, _ := json.Marshal(p) // strings, booleans and numbers
	return &exec.Cmd{Path: "/proc/self/exe", Args: append([]string{launcherName, string(policy), path}, args...)}
}

// ownTasks is the number of processes and threads of this user at the first call. Without /proc
// it is none.
var ownTasks = sync.OnceValue(func() uint64 {
	n, _ := countTasks(os.Getuid())
	return n
})

// countTasks counts the processes and threads of a user. The number of links of a process's
// task folder is two more than its threads.
func countTasks(uid int) (n uint64, err error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return 0, err
	}
	defer func() { _ = dir.Close() }()
	names, err := dir.Readdirnames(-1)
	for _, name := range names {
		var st unix.Stat_t
		if name[0] < '0' || name[0] > '9' || unix.Stat("/proc/"+name+"/task", &st) != nil || int(st.Uid) != uid {
			continue
		}
		n += max(uint64(st.Nlink), 2) - 2
	}
	return n, err
}

// Start starts a Command and returns when the program runs under its restrictions, or could
// not be started. After an error no process is left.
func Start(cmd *exec.Cmd) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	cmd.ExtraFiles = []*os.File{w} // reportFD in the launcher
	err = cmd.Start()
	w.Close()
	if err != nil {
		return err
	}
	_ = r.SetReadDeadline(time.Now().Add(startTimeout))
	report, err := io.ReadAll(io.LimitReader(r, 4096))
	if err == nil && len(report) == 0 {
		return nil
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if err != nil {
		return fmt.Errorf("the sandbox was not ready in %s: %w", startTimeout, err)
	}
	return errors.New(string(report))
}
