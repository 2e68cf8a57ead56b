package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

// launcherName is the name (argv[0]) of a process that restricts itself and executes a
// program.
const launcherName = "agentctl-plugin-launcher"

// startTimeout bounds the time from the start of the launcher to that of the program.
const startTimeout = 10 * time.Second

// reportFD is the descriptor on which a launcher reports an error. It closes when the program
// is executed.
const reportFD = 3

// Command returns a command that runs the executable path under the policy. The caller may set
// everything but ExtraFiles, and starts it with Start.
func Command(p Policy, path string) *exec.Cmd {
	policy, _ := json.Marshal(p) // strings, booleans and numbers
	return &exec.Cmd{Path: "/proc/self/exe", Args: []string{launcherName, string(policy), path}}
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
