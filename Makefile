# agentctl. `make demo` shows it, `make test` tests it; both need Go and git only.
# `make help` lists the rest.

GO          ?= go
BIN         := bin
# Where `make board` puts its binary; GOOS, GOARCH and GOARM choose another platform.
BOARD       ?= $(BIN)/agentctl-board
DIST        := dist
VERSION     ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
BUILT_AT    ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
LDFLAGS     := -s -w -buildid= -X agentctl/cmd/internal/cli.Version=$(VERSION) -X agentctl/cmd/internal/cli.Stamp=agentctl-version=$(VERSION);agentctl-built=$(BUILT_AT); -X agentctl/cmd/internal/cli.BuiltAt=$(BUILT_AT)
BUILD       := CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)'
BOARD_TAG   := agentctl_omit_relay
# The board build, for flash cards (docs/performance.md, "The size of the board build"):
# without HTTP/2, which nothing on a board speaks, and inlined only where it works each second.
BOARD_HOT   := runtime internal/... sync sync/... syscall time os io bytes strconv unicode/utf8 math math/bits agentctl/prober modernc.org/sqlite/lib modernc.org/libc
BOARD_FLAGS := -tags $(BOARD_TAG),nethttpomithttp2 -gcflags=all=-l $(foreach p,$(BOARD_HOT),-gcflags=$(p)=)
# The full build, for a relay: only what no call and no stream waits for is not inlined.
FULL_COLD   := agentctl/cmd/... agentctl/config agentctl/configctl agentctl/doctor agentctl/relay/backup agentctl/relay/checkup \
               encoding/gob math/big golang.org/x/text/... go.yaml.in/yaml/v3 github.com/godbus/dbus/v5 github.com/google/jsonschema-go/... \
               github.com/modelcontextprotocol/go-sdk/... github.com/pelletier/go-toml/... github.com/spf13/...
FULL_FLAGS  := $(foreach p,$(FULL_COLD),-gcflags=$(p)=-l)
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
# The race detector needs a C compiler; without one the tests run without it. SQLite, which is
# C translated to Go, is not instrumented, nor are its C library and allocator: that takes two
# thirds of the time of every test with a database, and cannot find a race of ours. The packages
# that call it are instrumented.
CC_FOUND    := $(shell command -v gcc || command -v cc || command -v clang)
RACE        := $(if $(CC_FOUND),-race -gcflags=modernc.org/sqlite/lib=-race=false -gcflags=modernc.org/libc=-race=false -gcflags=modernc.org/memory=-race=false,)
# A binary with the detector waits before it exits, for races in goroutines that are left:
# a second by default, which 50 packages and the processes they start add up.
RACE_ENV    := $(if $(CC_FOUND),CGO_ENABLED=1 GORACE=atexit_sleep_ms=100,CGO_ENABLED=0)
# The last nfpm whose dependencies the public module proxy serves.
NFPM        := $(GO) run github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.45.2
# The last syft and govulncheck of which the same holds. They are built for a release only.
SYFT        := github.com/anchore/syft/cmd/syft@v1.50.0
GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.8.0
# Platforms of a release: GOOS/GOARCH[/GOARM].
PLATFORMS   := linux/amd64 linux/arm64 linux/arm/6 linux/arm/7 linux/riscv64
# Of the commands that call a relay, which also work on other systems.
CLIENT_PLATFORMS := darwin/arm64 darwin/amd64 windows/amd64
# Of the packages; Debian's armhf is built for ARMv6, so that it runs on every Raspberry Pi.
DEB_PLATFORMS ?= linux/amd64 linux/arm64 linux/arm/6 linux/riscv64
# One package more at a time than there are CPUs: many wait for disks, timers and processes.
OVERLAP     := -p $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n + 1)))
FUZZTIME    ?= 60s
DEMO        ?=

.DEFAULT_GOAL := build
.PHONY: build board demo test test-slow test-slow-system test-slow-link test-slow-packages test-qemu test-board test-32 lint ci cross reproducible deb release vulncheck test-systemd test-clients test-adopt conformance fuzz bench soak clean help

build: ## this machine's binary, full build: bin/agentctl
	$(BUILD) $(FULL_FLAGS) -o $(BIN)/agentctl ./cmd/agentctl

board: ## this machine's binary without the relay, as small boards get it
	$(BUILD) $(BOARD_FLAGS) -o $(BOARD) ./cmd/agentctl

demo: build ## the whole loop on this machine; Ctrl-C ends it (DEMO='--for 10s' ends by itself)
	@$(BIN)/agentctl demo $(DEMO)

test: ## all tests, with the race detector where there is a C compiler
	$(RACE_ENV) $(GO) test $(RACE) $(OVERLAP) -timeout 15m ./test ./... # ./test takes longest: it starts first

test-board: ## the tests of what differs in the board build
	CGO_ENABLED=0 $(GO) test -tags $(BOARD_TAG) ./manifest ./cmd/... ./control ./handlers ./daemon ./config ./configctl ./doctor ./client ./monitor

test-32: ## the tests as a 32-bit machine sees them: its int has 32 bits, its NaN is another whole number
	@[ "$$($(GO) env GOHOSTARCH)" = amd64 ] || { echo "test-32: only an amd64 machine runs 386 binaries: left out"; exit 0; }; \
	  GOARCH=386 CGO_ENABLED=0 $(GO) test $(OVERLAP) -timeout 15m $$($(GO) list ./... | grep -v -e /test -e /docs)

lint: ## gofmt, vet (both builds, other systems), staticcheck (both builds); import rules
	@out=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$out" ] || { echo "gofmt would change:"; echo "$$out"; exit 1; }
	$(GO) vet ./...
	$(GO) vet -tags $(BOARD_TAG) ./...
	@set -e; for os in darwin windows; do echo "vet for $$os"; \
	  GOOS=$$os CGO_ENABLED=0 $(GO) vet $$(GOOS=$$os $(GO) list -deps ./cmd/agentctl | grep '^agentctl/'); done
	$(GO) vet -C test/bench ./...
	$(GO) vet -C test/faultfs ./...
	$(GO) run $(STATICCHECK) ./...
	$(GO) run $(STATICCHECK) -tags $(BOARD_TAG) ./cmd/... ./manifest/...
	cd test/bench && $(GO) run $(STATICCHECK) ./...
	cd test/faultfs && $(GO) run $(STATICCHECK) ./...
	$(GO) test -run 'TestImportRules|TestImportsAllowed' ./test

cross: ## release binaries for every platform, full and board, and for clients on macOS and Windows: dist/
	@mkdir -p $(DIST)
	@set -e; for p in $(PLATFORMS); do \
	  IFS=/ read -r os arch arm <<< "$$p"; name=$$os-$$arch$${arm:+v$$arm}; \
	  for kind in agentctl agentctl-board; do \
	    flags='$(FULL_FLAGS)'; [ $$kind = agentctl ] || flags='$(BOARD_FLAGS)'; \
	    GOOS=$$os GOARCH=$$arch GOARM=$$arm $(BUILD) $$flags -o $(DIST)/$$kind-$$name ./cmd/agentctl; \
	    echo "$$(wc -c < $(DIST)/$$kind-$$name) $(DIST)/$$kind-$$name"; \
	  done; \
	done
	@set -e; for p in $(CLIENT_PLATFORMS); do \
	  IFS=/ read -r os arch <<< "$$p"; name=agentctl-$$os-$$arch; [ $$os != windows ] || name=$$name.exe; \
	  GOOS=$$os GOARCH=$$arch $(BUILD) $(FULL_FLAGS) -o $(DIST)/$$name ./cmd/agentctl; \
	  echo "$$(wc -c < $(DIST)/$$name) $(DIST)/$$name"; \
	done
cross reproducible: SHELL := /bin/bash

deb: board ## Debian packages of both builds: dist/*.deb
	$(MAKE) cross PLATFORMS='$(DEB_PLATFORMS)' CLIENT_PLATFORMS=
	@NFPM='$(NFPM)' DIST='$(DIST)' PLATFORMS='$(DEB_PLATFORMS)' VERSION='$(VERSION)' BUILT_AT='$(BUILT_AT)' \
	  HOST_BINARY=$(BIN)/agentctl-board GO='$(GO)' systemd/deb.sh

release: ## binaries, packages, an SPDX document of each binary, and SHA256SUMS: dist/ (some minutes more the first time)
	rm -rf $(DIST)
	$(MAKE) cross deb
	@DIST='$(DIST)' VERSION='$(VERSION)' GO='$(GO)' SYFT='$(SYFT)' release/release.sh

vulncheck: ## known vulnerabilities in what both builds call; says so if the database cannot be reached
	@GO='$(GO)' GOVULNCHECK='$(GOVULNCHECK)' BOARD_TAG='$(BOARD_TAG)' release/vulncheck.sh

test-systemd: ## units and packages under a real systemd, in a container (needs root; says so and skips)
	test/systemd/run.sh

reproducible: ## two builds from two folders give the same bytes
	test/reproducible.sh

conformance: build ## the official MCP conformance suite, both eras (needs npm)
	AGENTCTL=$(CURDIR)/$(BIN)/agentctl test/conformance.sh

fuzz: ## every fuzz target for FUZZTIME each
	FUZZTIME=$(FUZZTIME) test/fuzz.sh

bench: build board ## the performance bars, side by side in one run (see docs/performance.md)
	test/bench.sh

soak: build ## an hour of faults and load; SOAK=5m for a slice
	test/soak.sh

# Three groups at a time: the first waits most of its time, the second is one goroutine.
test-slow: ## what needs real minutes, or no race detector
	$(MAKE) --no-print-directory -j3 test-slow-system test-slow-link test-slow-packages

test-slow-system:
	AGENTCTL_SLOW=1 $(GO) test -timeout 15m -run 'TestRFC0009.*Real$$|TestFleet$$|TestSwapsLoseNothing|TestTicketsSurviveKill|TestKilledDaemon|TestBombs|TestDisk.*Real$$' ./test

test-slow-link:
	AGENTCTL_SLOW=1 $(GO) test -timeout 15m -run 'TestChaos|TestResumeModel|TestPolledLinkEndsOnce' ./transport/link

test-slow-packages:
	AGENTCTL_SLOW=1 $(GO) test -timeout 15m ./sqlitefile ./relay/eventlog ./relay/checkup
	AGENTCTL_SLOW=1 AGENTCTL_SEEDS=30 $(GO) test -timeout 15m -run 'TestSimulation|TestEveryCallEndsOnce|TestBreakAfterCommand|TestKilledWhileRevoking' ./relay/hub ./relay/auth
	AGENTCTL_SLOW=1 $(GO) test -timeout 15m -run 'TestReplaceUnderLoad|TestBucketsAgreeWithRows|TestCallAfterLostConnection|TestSeqAtOfManyEvents' ./relay/kernel ./prober/history ./relay/plugins/process ./relay
	$(GO) test -timeout 15m -run 'TestMemory|TestMuchWithoutATime|TestQueryCost|TestSeriesCost' ./prober/history
	AGENTCTL_SLOW=1 $(GO) test -timeout 15m -run 'TestInspectionsAreBounded' ./handlers
	AGENTCTL_SLOW=1 $(GO) test -timeout 15m -run 'TestHostileClient|TestVSCodeClient|TestHistoryStream|TestHistoryTooLong' ./control
	$(GO) test -timeout 15m -run 'TestStalledReader|TestRegistryBytes|TestSameSeedSameTranscript|TestManifestSchemaAgrees|TestLogFilterOffCostsNothing' ./relay/mcp ./relay/kernel ./relay/plugins/process ./relay/stages

test-qemu: ## board binaries of other platforms in an emulator (skips without qemu-user-static)
	AGENTCTL_QEMU=1 $(GO) test -timeout 10m -run TestBoards ./test

test-clients: ## real MCP clients, which npm installs for the test, with a demo relay; at most 20 minutes
	AGENTCTL_CLIENTS=1 $(GO) test -timeout 20m -run 'TestClientPrograms' ./test

test-adopt: ## servers of the authors of MCP as plugins, which npm installs for the test; at most 10 minutes
	AGENTCTL_ADOPT=1 $(GO) test -timeout 10m -run 'TestOfficialServers' ./test

ci: build lint test test-slow test-board test-32 cross test-qemu reproducible ## what CI runs
	FUZZTIME=3s test/fuzz.sh
	AGENTCTL=$(CURDIR)/$(BIN)/agentctl test/conformance.sh
	test/systemd/run.sh
	$(MAKE) vulncheck

clean:
	rm -rf $(BIN) $(DIST)

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16
