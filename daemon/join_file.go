package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"agentctl/config"
	"agentctl/statedir"
	"agentctl/transport/enroll"
)

// JoinFile is the file beside config.yaml, or the systemd credential, whose line makes a board
// without a credential join.
const JoinFile = "join"

// maxJoinFile bounds the size of a join file, bytes.
const maxJoinFile = 4096

// Pauses between attempts of a join by file.
const (
	minJoinPause   = time.Second
	maxJoinPause   = time.Minute
	finalJoinPause = time.Hour // after what only a person can change
)

// joinByFile joins with the line that an image brought. It returns when the board has joined,
// when there is no such line, or when ctx ends.
//
// The file is read again for each attempt. A line that cannot work is tried once an hour, so
// that a relay which was wrong about it has a second chance.
func (d *Daemon) joinByFile(ctx context.Context) {
	for attempt := 0; ; attempt++ {
		path, text, err := d.readJoinFile()
		if path == "" {
			return
		}
		var line enroll.JoinLine
		if err == nil {
			line, err = enroll.ParseJoinLine(text)
		}
		if err == nil && d.disk.Status().State == statedir.Hung { // a join would wait for it, and could not be ended
			err = &enroll.StorageError{Dir: d.disk.Dir(), Err: statedir.ErrHung}
		}
		if err == nil && enroll.HasLeft(d.config().Text("state_dir"), line.Code) {
			d.log.Info("the join file is not used: this board has left with its code", zap.String("file", path))
			return
		}
		if err == nil {
			err = d.joinWith(ctx, line)
		}
		if err == nil || ctx.Err() != nil {
			return
		}
		pause := joinPause(err, attempt)
		d.setJoinStatus(err, path, line.Relay, pause)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// joinWith makes one attempt.
func (d *Daemon) joinWith(ctx context.Context, line enroll.JoinLine) error {
	c := d.config()
	if relay := c.Text("relay"); relay != "" {
		return &ConfiguredRelayError{Relay: relay, Origin: c.Settings["relay"].Origin}
	}
	tls, err := c.TLS()
	if err != nil {
		return err
	}
	tls.Time = d.tlsTime
	_, _, err = enroll.Join(ctx, enroll.JoinOptions{
		StateDir: c.Text("state_dir"), Relay: line.Relay, CASHA256: line.CASHA256, Code: line.Code,
		Name: c.Text("name"), Version: d.build.Version, TLS: tls,
	})
	if err == nil {
		err = d.updateMembership()
	}
	return err
}

// ConfiguredRelayError reports a join while the configuration names a relay.
type ConfiguredRelayError struct{ Relay, Origin string }

func (e *ConfiguredRelayError) Error() string {
	return fmt.Sprintf("the configuration names the relay %s (%s), which takes precedence over a join", e.Relay, e.Origin)
}

// joinPause is the time until the next attempt. Full jitter spreads the boards of one image.
func joinPause(err error, attempt int) time.Duration {
	var e *enroll.Error
	var storage *enroll.StorageError
	var retryAfter time.Duration
	switch {
	case errors.As(err, &e) && e.Kind != enroll.Refused && e.Kind != enroll.ForAgent:
		retryAfter = e.RetryAfter // a wrong certificate, too: a captive portal is before the relay
	case !errors.As(err, &storage):
		return finalJoinPause + rand.N(finalJoinPause/10)
	}
	d := min(minJoinPause<<min(attempt, 6), maxJoinPause)
	return max(retryAfter, minJoinPause/2+rand.N(d))
}

// setJoinStatus shows and logs a failed attempt.
func (d *Daemon) setJoinStatus(err error, path, relay string, pause time.Duration) {
	s := JoinStatus{State: JoinJoining, Relay: relay, Error: err.Error(), Hint: retryHint(err), File: path, NextTryMS: time.Now().Add(pause).UnixMilli()}
	if pause >= finalJoinPause {
		s.State = JoinRefused
	}
	d.mu.Lock()
	isNew := d.member.join.Error != s.Error
	d.member.join = s
	d.mu.Unlock()
	if isNew {
		d.log.Warn("this board could not join", zap.String("file", path), zap.Error(err), zap.String("hint", s.Hint), zap.Duration("next_try_in", pause.Round(time.Second)))
	}
}

// readJoinFile reads the join line of this machine. path is "" where there is none.
func (d *Daemon) readJoinFile() (path, text string, err error) {
	for _, path := range []string{config.Credential(JoinFile), filepath.Join(filepath.Dir(d.source.Path), JoinFile)} {
		if path == "" {
			continue
		}
		f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.ENOTDIR) {
			continue // the service reads the file as a credential only
		}
		if err != nil {
			return path, "", err
		}
		defer func() { _ = f.Close() }()
		b, err := io.ReadAll(io.LimitReader(f, maxJoinFile+1))
		if err == nil && len(b) > maxJoinFile {
			err = fmt.Errorf("%s is larger than %d bytes", path, maxJoinFile)
		}
		if err == nil && len(bytes.TrimSpace(b)) == 0 {
			continue
		}
		return path, string(b), err
	}
	return "", "", nil
}
