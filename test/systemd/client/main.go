// Command client is what the systemd test does to the daemon from inside the container:
//
//	client poll SOCKET FILE   asks for status and snapshot, on a new connection each time,
//	                          until FILE exists; prints "requests=N failed=N slowest_ms=N"
//	client stop SOCKET        asks the daemon to stop local sampling
//	client dial SOCKET        connects, and hangs up
//	client cert DIR           makes DIR/tls.crt and DIR/tls.key for 127.0.0.1
package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"agentctl/control"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "client:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 3 && args[0] == "poll":
		return poll(args[1], args[2])
	case len(args) == 2 && args[0] == "stop":
		c, err := control.Dial(context.Background(), args[1])
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		return c.Stop(context.Background())
	case len(args) == 2 && args[0] == "dial":
		conn, err := net.Dial("unix", args[1])
		if err != nil {
			return err
		}
		return conn.Close()
	case len(args) == 2 && args[0] == "cert":
		return cert(args[1])
	}
	return errors.New("usage: client poll SOCKET FILE | stop SOCKET | dial SOCKET | cert DIR")
}

// poll reports how many requests failed, and why the first few did.
func poll(socket, until string) error {
	var requests, failed int
	var slowest time.Duration
	for {
		if _, err := os.Stat(until); err == nil {
			break
		}
		begin := time.Now()
		requests++
		if err := ask(socket); err != nil {
			if failed++; failed <= 5 {
				fmt.Printf("request %d failed after %v: %v\n", requests, time.Since(begin).Round(time.Millisecond), err)
			}
		}
		slowest = max(slowest, time.Since(begin))
		time.Sleep(2 * time.Millisecond) // the machine runs other processes too
	}
	fmt.Printf("requests=%d failed=%d slowest_ms=%d\n", requests, failed, slowest.Milliseconds())
	return nil
}

func ask(socket string) error {
	// A stop may take seconds; a client that waits for it is not one that failed.
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c, err := control.Dial(ctx, socket)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	var status struct {
		NodeID string `json:"node_id"`
	}
	if err := c.Status(ctx, &status); err != nil {
		return err
	}
	if status.NodeID == "" {
		return errors.New("a status without node_id")
	}
	if _, err := c.Snapshot(ctx); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	return nil
}

func cert(dir string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	t := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, &key.PublicKey, key)
	if err != nil {
		return err
	}
	kb, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	if err := write(filepath.Join(dir, "tls.crt"), "CERTIFICATE", der); err != nil {
		return err
	}
	return write(filepath.Join(dir, "tls.key"), "EC PRIVATE KEY", kb)
}

func write(path, kind string, der []byte) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}
