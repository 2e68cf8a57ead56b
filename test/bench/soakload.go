//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"regexp"
	"strings"
	"time"
)

var errorCode = regexp.MustCompile(`E_[A-Z_]+`)

// caller calls echo on board after board. Any answer will do as long as there is one in
// time: 200, an error of the closed set, or, when the relay was killed, a broken
// connection.
func (s *soaker) caller(ctx context.Context, i int) {
	var a *httpRequester
	for n := i; ctx.Err() == nil; n += soakCallers {
		if a == nil {
			var err error
			if a, err = dialHTTP(s.relayAddr, s.relay.unaryRequest); err != nil {
				s.count("calls: no relay")
				pause(ctx, 200*time.Millisecond)
				continue
			}
		}
		_ = a.SetDeadline(time.Now().Add(2 * callBound))
		begin := time.Now()
		err := a.do(n)
		took := time.Since(begin)
		s.mu.Lock()
		s.worst = max(s.worst, took)
		s.mu.Unlock()
		if took > callBound {
			s.recordFailure("a call took longer than 5.25 s")
		}
		code := ""
		if err != nil {
			code = errorCode.FindString(err.Error())
		}
		switch {
		case err == nil:
			s.count("calls: ok")
		case code == "E_NODE_OFFLINE", code == "E_RATE_LIMITED", code == "E_DEADLINE_EXCEEDED":
			s.count("calls: " + code)
		case code != "":
			s.count("calls: " + code)
			s.recordFailure("a good call got " + code)
		default: // the connection broke
			s.count("calls: cut")
			if !killed(err) || s.kills.Load() == 0 {
				s.recordFailure("a call ended with " + err.Error())
			}
			_ = a.Close()
			a = nil
		}
		pause(ctx, rand.N(20*time.Millisecond))
	}
	if a != nil {
		_ = a.Close()
	}
}

// killed reports whether a connection ended because its peer was killed.
func killed(err error) bool {
	var ne net.Error
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || (errors.As(err, &ne) && !ne.Timeout())
}

// reader follows streams, one after the other; delay is what it waits between frames.
func (s *soaker) reader(ctx context.Context, delay time.Duration) {
	name := "readers: "
	if delay > 0 {
		name = "slow readers: "
	}
	for ctx.Err() == nil {
		stalls := false
		if delay > 0 {
			stalls = true // or the kernel would take hours of frames for it
		}
		sub, err := subscribe(s.relayAddr, s.relay.token, metricsTool(s.relay.nodes[rand.N(len(s.relay.nodes))]), stalls)
		if err != nil {
			s.count(name + "refused")
			pause(ctx, time.Second)
			continue
		}
		kills := s.kills.Load()
		stop := context.AfterFunc(ctx, func() { _ = sub.conn.Close() })
		last := int64(0)
		life, leave := context.WithTimeout(ctx, 10*time.Second+rand.N(time.Minute))
		unlife := context.AfterFunc(life, func() { _ = sub.conn.Close() })
		closed, err := sub.frames(func(data []byte) {
			var f struct {
				TSMS int64 `json:"ts_ms"`
			}
			if json.Unmarshal(data, &f) != nil || f.TSMS <= last {
				s.recordFailure("a frame is malformed or not newer than the one before")
			}
			last = f.TSMS
			s.count("frames")
			pause(ctx, delay)
		})
		left := life.Err() != nil || ctx.Err() != nil // ctx ends a moment before its child
		unlife()
		leave()
		stop()
		_ = sub.conn.Close()
		s.ended(name, closed, err, left, s.kills.Load() != kills)
		pause(ctx, 100*time.Millisecond)
	}
}

// stalled opens streams with the smallest window and reads nothing for 20 s. By then the
// relay has cut each, and its close event must be there when the reader resumes: the
// close event waits for half a minute.
func (s *soaker) stalled(ctx context.Context) {
	const name = "stalled readers: "
	for ctx.Err() == nil {
		sub, err := subscribe(s.relayAddr, s.relay.token, metricsTool(s.relay.nodes[rand.N(len(s.relay.nodes))]), true)
		if err != nil {
			s.count(name + "refused")
			pause(ctx, time.Second)
			continue
		}
		kills := s.kills.Load()
		pause(ctx, 20*time.Second)
		if ctx.Err() == nil {
			_ = sub.conn.SetReadDeadline(time.Now().Add(5 * time.Second))
			closed, err := sub.frames(func([]byte) {})
			s.ended(name, closed, err, false, s.kills.Load() != kills)
		}
		_ = sub.conn.Close()
	}
}

// ended notes how a stream ended. Without a close event only a killed relay explains it.
func (s *soaker) ended(name string, closed []byte, err error, left, kill bool) {
	var c struct{ Code int }
	switch {
	case left && len(closed) == 0:
		s.count(name + "left")
	case json.Unmarshal(closed, &c) == nil && c.Code != 0:
		s.count(fmt.Sprint(name, c.Code))
		if c.Code != 1000 && c.Code != 4408 && c.Code != 4413 && c.Code != 4503 {
			s.recordFailure(fmt.Sprint("a stream ended with ", c.Code))
		}
		if strings.HasPrefix(name, "readers") && (c.Code == 4413 || c.Code == 4408) {
			s.recordFailure(fmt.Sprint("a prompt reader was cut with ", c.Code))
		}
	default:
		s.count(name + "cut without a word")
		if !kill || !killed(err) {
			s.recordFailure("a stream ended without a close event: " + err.Error())
		}
	}
}

func pause(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
